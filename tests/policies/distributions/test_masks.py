"""Masked distributions: no invalid action, and all numbers over the allowed choices only."""

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl.masks import ActionMask, MaskLayout
from lightning_rl.nested import leaves, map_leaves
from lightning_rl.policies.distributions import Autoregressive, Categorical, MultiCategorical, make_action_head
from lightning_rl.validation import ConfigurationError
from tests.policies.distributions.checks import EXACT, generator, randn

RAGGED = spaces.MultiDiscrete([3, 2, 4])
PAIR = spaces.MultiDiscrete([4, 3])
HYBRID = spaces.Dict({"arm": spaces.Tuple([spaces.Box(-1, 1, (2,)), RAGGED]), "move": spaces.Discrete(5)})
UNITS = spaces.Dict({"target": spaces.Discrete(3), "unit": spaces.Discrete(4)})

DISCRETE_MASK, RAGGED_MASK = ActionMask(5), ActionMask(9)
CONDITIONAL = spaces.Dict({"0": ActionMask(4), "1": ActionMask([4, 3], given="0")})
UNIT_MASK = spaces.Dict({"target": ActionMask([4, 3], given="unit"), "unit": ActionMask(4)})
TARGET_LAST = {"kind": "autoregressive", "order": ["unit", "target"]}


def head_of(space, mask_space, choice=None, size: float = 2.0):
    """A head in float64 whose logits are far from equal."""
    torch.manual_seed(0)
    head = make_action_head(space, 6, action_distribution=choice, mask_space=mask_space).double()
    for name, parameter in head.named_parameters():
        if "logits.weight" in name or "first.weight" in name or name.startswith("logits."):
            torch.nn.init.normal_(parameter, std=size)
    return head


def random_masks(mask_space, count: int, seed: int = 0):
    """Masks `[count, ...]` that allow at least one choice of each component."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        allowed = rng.random((count, *shape)) < 0.4
        return allowed | (np.arange(shape[-1]) == rng.integers(shape[-1], size=(count, *shape[:-1], 1)))

    def of_leaf(path: str, leaf: ActionMask) -> Tensor:
        parts = {9: (3, 2, 4)}.get(leaf.shape[-1])
        drawn = draw(*leaf.shape) if parts is None else np.concatenate([draw(n) for n in parts], -1)
        return torch.from_numpy(drawn.astype(np.int8))

    if isinstance(mask_space, ActionMask):
        return of_leaf("", mask_space)
    return {
        key: random_masks(part, count, seed + place + 1) for place, (key, part) in enumerate(sorted(mask_space.items()))
    }


def choose(mask: Tensor, action: Tensor) -> Tensor:
    return mask.gather(-1, action.unsqueeze(-1)).squeeze(-1) != 0


def is_allowed(space, mask, action) -> Tensor:
    """By hand, without the code under test."""
    if space is HYBRID:
        return is_allowed(RAGGED, mask["arm"]["1"], action["arm"][1]) & choose(mask["move"], action["move"])
    if space is UNITS:
        rows = mask["target"][torch.arange(len(action["unit"])), action["unit"]]
        return choose(mask["unit"], action["unit"]) & choose(rows, action["target"])
    if space is PAIR:
        rows = mask["1"][torch.arange(len(action)), action[:, 0]]
        return choose(mask["0"], action[:, 0]) & choose(rows, action[:, 1])
    if space is RAGGED:
        return choose(mask, action + torch.tensor([0, 3, 5])).all(-1) if mask.dim() == 1 else ragged(mask, action)
    if isinstance(space, spaces.MultiBinary):
        return mask.gather(-1, action.long().unsqueeze(-1)).all(-1).all(-1)
    return choose(mask, action)


def ragged(mask: Tensor, action: Tensor) -> Tensor:
    return (mask.gather(-1, action + torch.tensor([0, 3, 5])) != 0).all(-1)


CASES = [
    pytest.param(spaces.Discrete(5), DISCRETE_MASK, None, id="discrete"),
    pytest.param(RAGGED, RAGGED_MASK, None, id="ragged"),
    pytest.param(RAGGED, RAGGED_MASK, "autoregressive", id="ragged_autoregressive"),
    pytest.param(spaces.MultiBinary(3), ActionMask([3, 2]), None, id="binary"),
    pytest.param(spaces.MultiBinary(3), ActionMask([3, 2]), "autoregressive", id="binary_autoregressive"),
    pytest.param(
        HYBRID, spaces.Dict({"arm": spaces.Dict({"1": RAGGED_MASK}), "move": DISCRETE_MASK}), None, id="hybrid"
    ),
    pytest.param(PAIR, CONDITIONAL, "autoregressive", id="conditional"),
    pytest.param(UNITS, UNIT_MASK, TARGET_LAST, id="named_condition"),
]


@pytest.mark.parametrize(("space", "mask_space", "choice"), CASES)
def test_a_million_samples_obey_their_masks(space, mask_space, choice):
    rows, count = 20_000, 1_000_000
    head, features = head_of(space, mask_space, choice).float(), randn(rows, 6).float()
    masks = random_masks(mask_space, rows)
    random = generator()
    with torch.no_grad():
        distribution = head(features, masks)
        for _ in range(count // rows):
            assert is_allowed(space, masks, distribution.sample(random)).all()
        assert is_allowed(space, masks, distribution.mode()).all()
        # These checks need hard masks.
        assert not is_allowed(space, masks, head(features).sample(random)).all()


@pytest.mark.parametrize(("space", "mask_space", "choice"), CASES)
def test_choices_are_excluded_whatever_the_size_of_the_logits(space, mask_space, choice):
    """As of observations that are times in nanoseconds: choices that do not exist and masked ones are never taken."""
    head, features = head_of(space, mask_space, choice, size=1e12).float(), randn(2000, 6).float()
    masks = random_masks(mask_space, 2000)
    for allowed in (masks, map_leaves(torch.ones_like, masks)):
        distribution = head(features, allowed)
        assert is_allowed(space, allowed, distribution.sample(generator())).all()
        assert is_allowed(space, allowed, distribution.mode()).all()


@pytest.mark.parametrize(("space", "mask_space", "choice"), CASES)
def test_everything_is_finite_with_all_but_one_masked(space, mask_space, choice):
    head, features = head_of(space, mask_space, choice).float(), randn(7, 6).float().requires_grad_()
    masks = random_masks(mask_space, 7)

    def only_one(x: Tensor) -> Tensor:
        first = torch.zeros_like(x)
        if x.shape[-1] == 9:
            first[..., [1, 4, 8]] = 1
        else:
            first[..., -1] = 1
        return first

    masks = map_leaves(only_one, masks)
    distribution = head(features, masks)
    action = distribution.sample(generator())
    entropy = sum(part.double() for name, part in distribution.entropies().items() if not name.startswith("arm.0"))
    torch.testing.assert_close(entropy, torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-6)
    terms = distribution.log_prob(action) + distribution.entropy() + distribution.kl(head(features + 1, masks))
    terms.sum().backward()
    assert terms.isfinite().all() and features.grad.isfinite().all()
    for name, parameter in head.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def test_masked_distribution_equals_distribution_over_allowed_choices():
    head, mask = head_of(spaces.Discrete(5), DISCRETE_MASK), torch.tensor([[0, 1, 1, 0, 1]])
    x, y = randn(1, 6), randn(1, 6, seed=1)
    ours, other = head(x, mask), head(y, mask)
    few, few_other = (Categorical(head(z).logits[:, [1, 2, 4]]) for z in (x, y))
    torch.testing.assert_close(ours.entropy(), few.entropy(), **EXACT)
    torch.testing.assert_close(ours.kl(other), few.kl(few_other), **EXACT)
    for place, choice in enumerate((1, 2, 4)):
        found = ours.log_prob(torch.tensor([choice]))
        torch.testing.assert_close(found, few.log_prob(torch.tensor([place])), **EXACT)
    assert ours.log_prob(torch.tensor([0])).exp() == 0
    assert ours.mode().item() == (1, 2, 4)[few.mode().item()]
    # Logits of masked choices get no gradient.
    (gradient,) = torch.autograd.grad(ours.entropy().sum(), head.logits.weight)
    assert (gradient.abs().sum(-1) > 0).tolist() == [False, True, True, False, True]


def test_components_and_switches_are_masked_one_by_one():
    head, x = head_of(RAGGED, RAGGED_MASK), randn(1, 6)
    mask = torch.tensor([[1, 0, 1, 0, 1, 1, 1, 0, 0]])
    entropies = head(x, mask).entropies()
    logits = head.logits(x)
    torch.testing.assert_close(entropies["0"], Categorical(logits[:, [0, 2]]).entropy(), **EXACT)
    assert entropies["1"].item() == 0
    torch.testing.assert_close(entropies["2"], Categorical(logits[:, [5, 6]]).entropy(), **EXACT)
    switches = head_of(spaces.MultiBinary(3), ActionMask([3, 2]))
    distribution = switches(x, torch.tensor([[[1, 0], [0, 1], [1, 1]]]))
    assert {tuple(distribution.sample(generator(seed))[0, :2].tolist()) for seed in range(20)} == {(0, 1)}
    free = switches(x).logits[0, 2].sigmoid()
    torch.testing.assert_close(distribution.entropy()[0], torch.distributions.Bernoulli(free).entropy())


def test_full_mask_gives_bit_identical_results():
    for space, mask_space in ((spaces.Discrete(5), DISCRETE_MASK), (RAGGED, RAGGED_MASK)):
        head, x = head_of(space, mask_space), randn(30, 6)
        plain, masked = head(x), head(x, torch.ones(30, *mask_space.shape, dtype=torch.int8))
        action = plain.sample(generator())
        assert torch.equal(action, masked.sample(generator()))
        assert torch.equal(plain.log_prob(action), masked.log_prob(action))


def brute_force(head, x: Tensor, masks) -> dict[tuple[int, ...], Tensor]:
    """Log-probability of each combination by the chain rule, one conditional after the other, `[rows]` each."""
    allowed = {} if masks is None else head.layout.allowed(masks)
    found = {}
    for combination in itertools.product(*map(range, head.counts)):
        total = torch.zeros(len(x), dtype=x.dtype)
        for k, name in enumerate(head.names):
            if k == 0:
                logits = head.first(x)
            else:
                offsets = itertools.accumulate([0, *head.counts[: k - 1]])
                rows = [offset + choice for offset, choice in zip(offsets, combination[:k], strict=True)]
                hidden = torch.tanh(head.hidden[k - 1](x) + sum(head.tables[k - 1][row] for row in rows))
                logits = head.logits[k - 1](hidden)
            if name in allowed:
                mask = allowed[name]
                if name in head.layout.given:
                    mask = mask[:, combination[head.names.index(head.layout.given[name])]]
                logits = logits.masked_fill(~mask, -1e9)
            total = total + logits.log_softmax(-1)[:, combination[k]]
        found[combination] = total
    return found


@pytest.mark.parametrize(
    ("space", "mask_space", "choice"),
    [
        (PAIR, None, "autoregressive"),
        (PAIR, CONDITIONAL, "autoregressive"),
        (RAGGED, None, {"kind": "autoregressive", "order": [2, 0, 1], "hidden_size": 8}),
        (RAGGED, RAGGED_MASK, "autoregressive"),
        (UNITS, UNIT_MASK, TARGET_LAST),
    ],
)
def test_autoregressive_is_the_chain_rule_over_all_combinations(space, mask_space, choice):
    head, x, y = head_of(space, mask_space, choice), randn(9, 6), randn(9, 6, seed=3)
    masks = None if mask_space is None else random_masks(mask_space, 9)
    p, q = brute_force(head, x, masks), brute_force(head, y, masks)
    ours, other = (head(z, masks) if masks is not None else head(z) for z in (x, y))
    assert isinstance(ours, Autoregressive)
    probabilities = torch.stack(list(p.values()), -1).exp()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(9, dtype=torch.float64), **EXACT)
    loose = {"rtol": 1e-9, "atol": 1e-9}
    for combination, expected in p.items():
        by_name = dict(zip(head.names, (torch.full((9,), choice) for choice in combination), strict=True))
        action = by_name if space is UNITS else torch.stack([by_name[str(i)] for i in range(len(by_name))], -1)
        torch.testing.assert_close(ours.log_prob(action).exp(), expected.exp(), **loose)
    log_p, log_q = (torch.stack(list(found.values()), -1) for found in (p, q))
    torch.testing.assert_close(ours.entropy(), -(probabilities * log_p).sum(-1), **loose)
    torch.testing.assert_close(ours.kl(other), (probabilities * (log_p - log_q)).sum(-1), **loose)
    torch.testing.assert_close(ours.log_prob(ours.mode()), log_p.amax(-1), **loose)
    assert list(ours.entropies()) == head.names
    torch.testing.assert_close(sum(ours.entropies().values()), ours.entropy(), **loose)
    # The marginal distribution of the first component.
    first = torch.stack([probabilities[:, [c[0] == n for c in p]].sum(-1) for n in range(head.counts[0])], -1)
    torch.testing.assert_close(ours.entropies()[head.names[0]], torch.special.entr(first).sum(-1), **loose)


def test_an_autoregressive_distribution_of_no_rows_has_entropies_of_no_rows():
    """A rank may have no row that counts."""
    entropies = head_of(PAIR, None, "autoregressive")(randn(0, 6)).entropies()
    assert [x.shape for x in entropies.values()] == [(0,), (0,)]


def test_samples_are_as_frequent_as_their_probabilities():
    head = head_of(PAIR, CONDITIONAL, "autoregressive", size=0.5)
    count, masks = 40_000, random_masks(CONDITIONAL, 1, seed=4)
    x = randn(1, 6)
    rows = head(x.expand(count, 6), map_leaves(lambda mask: mask.expand(count, *mask.shape[1:]), masks))
    samples = rows.sample(generator())
    for combination in itertools.product(range(4), range(3)):
        action = torch.tensor(combination)
        expected = head(x, masks).log_prob(action[None]).exp().item()
        observed = (samples == action).all(-1).double().mean().item()
        assert abs(observed - expected) <= 4 * (expected * (1 - expected) / count) ** 0.5 + 1e-12


def test_second_choice_depends_on_the_first_and_on_features():
    """Features select equal or unequal pairs, which independent logits cannot express."""
    torch.manual_seed(0)
    head = make_action_head(spaces.MultiDiscrete([2, 2]), 2, action_distribution="autoregressive")
    x = torch.eye(2).repeat(4, 1)
    first = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    action = torch.stack([first, torch.where(x[:, 0] == 1, first, 1 - first)], -1)
    optimizer = torch.optim.Adam(head.parameters(), 0.02)
    for _ in range(200):
        optimizer.zero_grad()
        loss = -head(x).log_prob(action).mean()
        loss.backward()
        optimizer.step()
    # The first component stays random, the second is certain.
    assert loss.item() == pytest.approx(np.log(2), abs=0.02)


def test_choices_that_leave_nothing_allowed_are_masked():
    layout = MaskLayout(PAIR, CONDITIONAL)
    second = torch.ones(1, 4, 3, dtype=torch.int8)
    second[0, [0, 2]] = 0
    masks = {"0": torch.tensor([[1, 0, 1, 1]]), "1": second}
    assert layout.allowed(masks)["0"].tolist() == [[False, False, False, True]]
    assert layout.nothing_allowed(map_leaves(Tensor.numpy, masks)) is None
    actions = head_of(PAIR, CONDITIONAL, "autoregressive")(randn(1, 6).expand(500, 6), masks).sample(generator())
    assert set(actions[:, 0].tolist()) == {3}
    second[0, 3] = 0
    name, rows = layout.nothing_allowed(map_leaves(Tensor.numpy, masks))
    assert name == "0" and rows.tolist() == [True]


def test_conditional_masks_chain_over_components():
    """Masks of later components restrict the first choice."""
    space = spaces.MultiDiscrete([2, 2, 2])
    masks = spaces.Dict({"1": ActionMask([2, 2], given="0"), "2": ActionMask([2, 2], given="1")})
    layout = MaskLayout(space, masks)
    # 0 leads to 0, 1 to 1; after 0 nothing is allowed.
    given = {"1": np.eye(2)[None], "2": np.array([[[0, 0], [1, 1]]])}
    assert layout.allowed(given)["0"].tolist() == [[False, True]]
    distribution = head_of(space, masks, "autoregressive")(randn(1, 6), map_leaves(torch.from_numpy, given))
    assert [distribution.sample(generator(seed))[0, :2].tolist() for seed in range(5)] == [[1, 1]] * 5


def test_autoregressive_part_of_a_joint_action_has_its_own_masks():
    nested = spaces.Dict({"arm": PAIR, "move": spaces.Discrete(5)})
    masks = spaces.Dict(
        {"arm": spaces.Dict({"0": ActionMask(4), "1": ActionMask([4, 3], given="arm.0")}), "move": ActionMask(5)}
    )
    head = head_of(nested, masks, {"arm": "autoregressive"})
    drawn = {"arm": random_masks(CONDITIONAL, 50), "move": random_masks(DISCRETE_MASK, 50)}
    distribution = head(randn(50, 6), drawn)
    action = distribution.sample(generator())
    assert is_allowed(PAIR, drawn["arm"], action["arm"]).all() and choose(drawn["move"], action["move"]).all()
    assert list(distribution.entropies()) == ["arm.0", "arm.1", "move"]


def test_masks_may_have_any_leading_dimensions():
    head, masks = head_of(UNITS, UNIT_MASK, TARGET_LAST), random_masks(UNIT_MASK, 6)
    x = randn(6, 6)
    flat = head(x, masks)
    folded = head(x.unflatten(0, (3, 2)), map_leaves(lambda mask: mask.unflatten(0, (3, 2)), masks))
    action = flat.sample(generator())
    expected = flat.log_prob(action).unflatten(0, (3, 2))
    found = folded.log_prob(map_leaves(lambda a: a.unflatten(0, (3, 2)), action))
    torch.testing.assert_close(found, expected, **EXACT)
    assert all(x.shape == (3, 2) for x in leaves(folded.mode()))


def test_autoregressive_distribution_with_masks_may_have_no_rows():
    distribution = head_of(RAGGED, RAGGED_MASK, "autoregressive")(randn(0, 6), random_masks(RAGGED_MASK, 0))
    assert distribution.log_prob(distribution.sample(generator())).shape == (0,)


class Plain(torch.nn.Module):
    """A custom head without masks."""

    def __init__(self, in_features: int, space: spaces.Discrete) -> None:
        super().__init__()
        self.logits = torch.nn.Linear(in_features, int(space.n))

    def forward(self, features: Tensor) -> Categorical:
        return Categorical(self.logits(features))


class Obedient(Plain):
    """A custom head with masks."""

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Categorical:
        logits = self.logits(features)
        return Categorical(logits if mask is None else logits.masked_fill(mask == 0, -1e9))


def test_custom_head_gets_the_mask():
    head = make_action_head(
        spaces.Discrete(5), 6, action_distribution={"class_path": f"{__name__}.Obedient"}, mask_space=DISCRETE_MASK
    )
    masks = random_masks(DISCRETE_MASK, 100)
    assert choose(masks, head(randn(100, 6).float(), masks).sample(generator())).all()


@pytest.mark.parametrize(
    ("space", "mask_space", "choice", "message"),
    [
        (spaces.Discrete(5), ActionMask(4), None, r"^action_mask has the shape \(4,\): expected \(5,\)"),
        (RAGGED, ActionMask([3, 4]), None, r"^action_mask has the shape \(3, 4\): expected \(9,\)"),
        (spaces.MultiBinary(3), ActionMask(3), None, r"^action_mask has the shape \(3,\): expected \(3, 2\)"),
        (
            HYBRID,
            spaces.Dict({"move": ActionMask(6)}),
            None,
            r"^action_mask.move has the shape \(6,\): expected \(5,\)",
        ),
        (
            HYBRID,
            spaces.Dict({"hand": ActionMask(5)}),
            None,
            r"'hand' has no choices to mask: expected arm.0, arm.1, move",
        ),
        (
            HYBRID,
            spaces.Dict({"arm": spaces.Dict({"0": ActionMask(3)})}),
            None,
            r"^action_mask.arm.0 has the shape \(3,\): expected \(2,\)",
        ),
        (PAIR, CONDITIONAL, None, r"^policy.action_distribution='MultiCategoricalHead' .* expected autoregressive"),
        (UNITS, UNIT_MASK, None, r"^policy.action_distribution.target='CategoricalHead' .* expected autoregressive"),
        (
            UNITS,
            UNIT_MASK,
            "autoregressive",
            r"order=\['target', 'unit'\] .* 'unit' before 'target', whose mask depends",
        ),
        (
            PAIR,
            spaces.Dict({"1": ActionMask([5, 3], given="0")}),
            "autoregressive",
            r"^action_mask.1 has the shape \(5, 3\): expected \(4, 3\)",
        ),
        (PAIR, spaces.Dict({"1": ActionMask([4, 3], given="2")}), "autoregressive", r"given='2' .* another component"),
        (
            spaces.MultiDiscrete([2, 2]),
            spaces.Dict({"0": ActionMask([2, 2], given="1"), "1": ActionMask([2, 2], given="0")}),
            "autoregressive",
            r"no component that depends on itself",
        ),
        (spaces.Discrete(5), None, "autoregressive", None),
        (spaces.MultiDiscrete([64, 65]), None, "autoregressive", r"with at most 4096 combinations"),
        (
            HYBRID,
            None,
            "autoregressive",
            r"action_distribution='autoregressive' .* this one is for MultiDiscrete",
        ),
        (PAIR, None, {"kind": "autoregressive", "order": [0, 0]}, r"order=\[0, 0\] .* each of 0, 1 once"),
        (PAIR, None, {"kind": "autoregressive", "order": "01"}, r"order='01' .* each of 0, 1 once"),
        (PAIR, None, {"kind": "autoregressive", "hidden_size": 0}, r"hidden_size=0 .* at least 1"),
        (UNITS, None, {"kind": "autoregressive", "depth": 2}, r"\['depth'\] .* of its options hidden_size, order"),
        (
            spaces.Discrete(5),
            DISCRETE_MASK,
            {"class_path": f"{__name__}.Plain"},
            r"^policy.action_distribution='Plain' .* whose forward takes features and a mask",
        ),
    ],
)
def test_invalid_masks_raise(space, mask_space, choice, message):
    if message is None:
        assert type(make_action_head(space, 4, action_distribution=choice)(torch.zeros(1, 4))) is Autoregressive
        return
    with pytest.raises(ConfigurationError, match=message):
        make_action_head(space, 4, action_distribution=choice, mask_space=mask_space)


@pytest.mark.parametrize("kind", ["gaussian", "squashed_gaussian", "beta"])
def test_components_that_an_action_lacks_do_not_count(kind):
    """A row with two of three components has the numbers of a distribution of two components."""
    low, high = np.array([-1.0, 0.0, -2.0]), np.array([1.0, 3.0, 2.0])
    wide, narrow = spaces.Box(low, high, dtype=np.float64), spaces.Box(low[:2], high[:2], dtype=np.float64)
    mask, features = torch.tensor([1, 1, 0]).expand(5, 3), 3 * randn(2, 5, 6)
    torch.manual_seed(0)
    head = make_action_head(wide, 6, 0.3, kind, ActionMask(3)).double()
    masked, other = (head(x, mask) for x in features)
    small = make_action_head(narrow, 6, 0.3, kind).double()(features[0])
    kept, other_kept = (
        small.with_parameters(map_leaves(lambda x: x[..., :2], one.parameters())) for one in (masked, other)
    )
    actions = masked.sample(generator())
    assert (actions[:, 2] == 0).all() and (actions[:, :2] != 0).all() and (masked.mode()[:, 2] == 0).all()
    torch.testing.assert_close(masked.log_prob(actions), kept.log_prob(actions[:, :2]), **EXACT)
    torch.testing.assert_close(masked.entropy(), kept.entropy(), **EXACT)
    torch.testing.assert_close(masked.kl(other), kept.kl(other_kept), **EXACT)
    everything = head(features[0], torch.ones(5, 3))
    torch.testing.assert_close(everything.log_prob(actions), head(features[0]).log_prob(actions), **EXACT)


def test_a_part_called_kind_is_a_part():
    space = spaces.Dict({"kind": spaces.Discrete(2), "to": spaces.MultiDiscrete([2, 2])})
    joint = make_action_head(space, 4, action_distribution={"kind": "categorical", "to": "autoregressive"})
    parts = joint(torch.zeros(1, 4)).parts
    assert type(parts["kind"]) is Categorical and type(parts["to"]) is Autoregressive
    assert type(make_action_head(RAGGED, 4)(torch.zeros(1, 4))) is MultiCategorical
