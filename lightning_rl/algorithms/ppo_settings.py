"""The options of PPO that are no schedules, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_rl.validation import check, check_bool, check_number, check_positive_int, is_int, is_one_of

_SETS_THE_RATE = ("anneal_learning_rate", "lr_scheduler")


def check_settings(given: Mapping[str, Any]) -> None:
    """Check options by themselves and against each other.

    Raises:
        ConfigurationError: One of them is out of range, or has no meaning beside another.
    """
    check_positive_int("num_epochs", given["num_epochs"])
    check_positive_int("num_minibatches", given["num_minibatches"])
    if given["num_value_epochs"] is not None:
        check_positive_int("num_value_epochs", given["num_value_epochs"])
    warmup = given["critic_warmup_steps"]
    check(is_int(warmup) and warmup >= 0, "critic_warmup_steps", warmup, "an integer of at least 0")
    check_number("value_coef", given["value_coef"], at_least=0)
    for name, bound in (("log_prob_clip", 0), ("dual_clip", 1), ("value_huber_delta", 0)):
        if given[name] is not None:
            check_number(name, given[name], above=bound)
    choices, choice = ("minibatch", "rollout", "none"), given["normalize_advantages"]
    check(is_one_of(choice, choices), "normalize_advantages", choice, f"one of {choices}")
    for name in ("recompute_advantages", "kl_rollback", "compile_loss", "overlapped"):
        check_bool(name, given[name])
    check(not given["kl_rollback"] or given["target_kl"] is not None, "kl_rollback", True, "a target_kl beside it")
    if given["overlapped"]:
        _check_overlapped(given)
    if (adaptive := given["adaptive_learning_rate"]) is not None:
        _check_adaptive(adaptive)
        others = [name for name in _SETS_THE_RATE if given[name]]
        others += ["learning_rate, a schedule,"] if isinstance(given["learning_rate"], dict) else []
        check(not others, "adaptive_learning_rate", adaptive, f"null, since {' and '.join(others)} is given")


def _check_overlapped(given: Mapping[str, Any]) -> None:
    whose = "beside overlapped: targets are those of V-trace, from the current values"
    for name, only in (("advantage_estimator", "gae"), ("value_target", "td_lambda"), ("recompute_values", False)):
        check(given[name] == only, name, given[name], f"{only!r} {whose}")
    name, only = "update_normalizers", "after"
    check(given[name] == only, name, given[name], f"{only!r} beside overlapped, which needs the policy as it was")


def _check_adaptive(adaptive: Any) -> None:  # noqa: ANN401 - it is checked here
    field, known = "adaptive_learning_rate", ("target_kl", "factor", "minimum", "maximum")
    valid = isinstance(adaptive, Mapping) and "target_kl" in adaptive and {*adaptive} <= {*known}
    check(valid, field, adaptive, f"target_kl and, if needed, {', '.join(known[1:])}")
    check_number(f"{field}: target_kl", adaptive["target_kl"], above=0)
    check_number(f"{field}: factor", adaptive.get("factor", 1.5), above=1)
    minimum = adaptive.get("minimum", 1e-6)
    check_number(f"{field}: minimum", minimum, above=0)
    check_number(f"{field}: maximum", adaptive.get("maximum", 1e-2), at_least=minimum)
