"""Whether anybody looks at the modules and operations that shorter ways would go past."""

from __future__ import annotations

from typing import Any

import torch

_GLOBAL = vars(torch.nn.modules.module)


def anybody_watches() -> bool:
    """Whether there are hooks for all modules, or something looks on that must see every operation."""
    return bool(
        _GLOBAL["_global_forward_hooks"]
        or _GLOBAL["_global_forward_pre_hooks"]
        or _GLOBAL["_global_backward_hooks"]
        or _GLOBAL["_global_backward_pre_hooks"]
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def is_watched(module: Any) -> bool:  # noqa: ANN401 - a module; those attributes are for PyTorch itself
    """Whether a module has hooks, is compiled by itself, or has a `forward` that its class has not."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
        or "forward" in module.__dict__
    )
