"""README and guide: their commands are real, their code runs, their links lead somewhere."""

import importlib
import inspect
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_rl import (
    A2C,
    CLEAR,
    IMPALA,
    MAPPO,
    PPG,
    PPO,
    RND,
    VMPO,
    BehaviourCloning,
    CriticPretraining,
    Distillation,
    OffPolicyPPG,
    OnPolicyAlgorithm,
    PPOKLPenalty,
    RolloutDataModule,
    TFAgentsPPO,
    algorithms,
)
from lightning_rl.cli import TRAINER_COMMANDS
from lightning_rl.cli.main import main, make_parser
from lightning_rl.options import default_groups, defaults_of, flat
from lightning_rl.tools.curves import find_logs
from tests import programs
from tests.helpers import (
    DISCRETE,
    VECTOR,
    FixedRollouts,
    MemoryLogger,
    make_data,
    make_trainer,
    merged,
    parameters_of,
    random_rollout,
)
from tests.vectors.load import load

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
TRAIN = "pip install -c constraints.txt -e . && lightning-rl fit --config ppo/cartpole"
TEST = 'pip install -c constraints.txt -e ".[test]" && pytest -n auto'


@pytest.fixture(autouse=True)
def as_in_a_checkout(in_tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    monkeypatch.setenv("LIGHTNING_RL_RUN_DIR", "")
    Path("configs").symlink_to(ROOT / "configs")
    Path("mine.yaml").write_text("data: {num_envs: 4}\n")
    # What other commands and scripts of the guide leave behind.
    Path("pulled").mkdir()
    for path in ("best.yaml", "preset.yaml", "pulled/config.yaml"):
        Path(path).symlink_to(ROOT / "configs/ppo/cartpole.yaml")
    monkeypatch.syspath_prepend(str(in_tmp_path))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Arguments of the lines that call the program, whatever starts it, without comments and redirections."""
    lines = [line for block in blocks(page, "bash") for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    called = [re.fullmatch(r"(?:srun |torchrun .* -m )?(?:lightning-rl|lightning_rl) (.*)", line) for line in lines]
    return [shlex.split(call[1].partition(" > ")[0], comments=True) for call in called if call]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


PAGE_OF = {tuple(command): name(page) for page in reversed(PAGES) for command in commands(page)}
COMMANDS = [(page, [*command]) for command, page in PAGE_OF.items()]
CONFIGURATIONS = [(name(page), block) for page in PAGES for block in blocks(page, "yaml")]


def test_the_two_commands_are_in_the_readme_each_on_one_line():
    lines = [line for block in blocks(README, "bash") for line in block.splitlines()]
    assert TRAIN in lines
    assert TEST in lines


def test_there_is_something_to_check():
    assert len(COMMANDS) > 12
    assert len(CONFIGURATIONS) > 8


def test_the_training_command_and_the_scripts_of_the_readme_run(capsys):
    short = ["--max_env_steps=2048", "--data.evaluation.episodes=2"]
    done = programs.run("-m", "lightning_rl", *shlex.split(TRAIN.partition("lightning-rl ")[2]), *short)
    assert done.returncode == 0, done.stderr
    assert "Done: 2048 environment steps" in done.stdout
    # The promised output has the same form.
    (shown,) = blocks(README, "text")
    shown, printed = (re.sub(r"[\d.]+", "0", text) for text in (shown, done.stdout))
    assert shown in printed

    namespace: dict = {}
    (script,) = blocks(README, "python")
    exec(script.replace("60_000", "4_096"), namespace)
    assert namespace["model"].env_steps == 4096
    assert namespace["trainer"].callback_metrics["val/episode_return"] > 0
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.slow
def test_the_script_of_the_readme_reaches_the_maximum_return():
    namespace: dict = {}
    exec(blocks(README, "python")[0], namespace)
    assert namespace["trainer"].callback_metrics["val/episode_return"] == 500


def test_the_scripts_of_the_first_steps_run():
    namespace: dict = {}
    for script in blocks(ROOT / "docs/getting_started.md", "python"):
        exec(script.replace("20_000", "2_048"), namespace)
    assert isinstance(namespace["model"], PPO)
    assert namespace["action"].shape == (1,)


def test_the_scripts_for_those_who_come_from_tf_agents_run():
    """What the learner does there: at the intervals that are asked for, and with the files that are promised."""
    page = ROOT / "docs/coming_from_tf_agents.md"
    namespace: dict = {}
    _there, here, *scripts = blocks(page, "python")
    exec(here.replace("100_000", "512"), namespace)
    assert namespace["model"].env_steps == 512
    for script in scripts:
        exec(script, namespace)
    kept = sorted(path.name for path in Path("tf_agents_run/checkpoints").iterdir())
    assert kept == ["step=1024.ckpt", "step=1536.ckpt", "step=2048.ckpt"]
    assert sorted(path.name for path in Path("tf_agents_run/policies").iterdir()) == ["step=1024", "step=2048"]
    assert namespace["action"].shape == (1,)
    assert {"loss", "policy_loss", "value_loss", "entropy"} <= set(namespace["losses"]) & set(
        namespace["after_step"].losses
    )
    assert namespace["after_step"].rollout.shape == (64, 4)
    (log,) = find_logs("tf_agents_run")
    assert log.scalars["train/weight_norm"].steps.tolist() == [512, 1024, 1536, 2048]
    items = re.findall(r"^(\d+)\. ", page.read_text(), re.MULTILINE)
    assert items == [str(number) for number in range(1, 29)]


def test_the_scripts_about_exporting_and_logging_run():
    namespace: dict = {}
    for page in ("docs/export.md", "docs/logging.md"):
        for script in blocks(ROOT / page, "python"):
            exec(script, namespace)
    assert namespace["actions"].shape == (3,)
    assert namespace["memory"]["actor"].abs().sum() > 0
    assert namespace["action"] in namespace["env"].action_space
    assert sorted(path.name for path in Path("policies").iterdir()) == ["final", "step=1024", "step=512"]
    described = set(re.findall(r"`(\w+)`", (ROOT / "docs/export.md").read_text()))
    assert set(json.loads(Path("policies/final/policy.json").read_text())) <= described
    data, model = namespace["data"], namespace["model"]
    callbacks = [namespace["EnvStepLimit"](1_280), namespace["WeightNorm"](200), namespace["Watch"]()]
    logger, before = MemoryLogger(), model.env_steps
    trainer = namespace["Trainer"](max_epochs=-1, logger=logger, limit_val_batches=0, callbacks=callbacks)
    trainer.fit(model, data)
    assert [step for step, _ in logger.rows("train/weight_norm")] == [*range(before + 256, 1_281, 256)]


def test_the_script_about_videos_runs():
    (script,) = blocks(ROOT / "docs/watching.md", "python")
    exec(script, {})
    assert sorted(path.name for path in Path("videos").iterdir()) == [f"step={n}-episode=0.mp4" for n in (1024, 2048)]


def write_own_package() -> None:
    """What docs/custom.md says, as the module that configurations name."""
    Path("my_package.py").write_text("\n\n".join(blocks(ROOT / "docs/custom.md", "python")))
    importlib.invalidate_caches()


def test_own_network_environment_and_algorithm_work_as_described():
    page = ROOT / "docs/custom.md"
    write_own_package()
    network, _, environment = blocks(page, "yaml")
    Path("network.yaml").write_text(network)
    Path("environment.yaml").write_text(environment)
    small = ["--config=network.yaml", "--config=environment.yaml", "--trainer.accelerator=cpu", "--num_threads=1"]
    small += [
        "--data.num_envs=4",
        "--data.rollout_length=64",
        "--data.evaluation.episodes=2",
        "--trainer.log_every_n_steps=1",
    ]
    cli = main(["fit", *small, "--max_env_steps=2560"])
    assert type(cli.model.policy.actor_encoder).__name__ == "Encoder"
    assert cli.model.policy.actor_encoder.linear.out_features == 128
    assert 0 < cli.trainer.callback_metrics["rollout/position"] < 5
    loaded = PPO.load_from_checkpoint(cli.run_dir / "checkpoints/last.ckpt")
    assert type(loaded.policy.critic_encoder).__name__ == "Encoder"
    cli = main([*commands(page)[0], "--max_env_steps=256", "--data.evaluation.episodes=2"])
    assert cli.model.policy.actor_encoder.linear.out_features == 128
    # The shortest way is five steps to the right, and the algorithm of one's own finds it.
    options = ["--data.env_id=my_package:Corridor-v0", "--data.env.kwargs={length: 5}", "--data.num_envs=16"]
    options += [
        "--data.rollout_length=32",
        "--model.learning_rate=0.01",
        "--trainer.accelerator=cpu",
        "--num_threads=1",
    ]
    cli = main(["fit", "--model=my_package.Reinforce", *options, "--max_env_steps=20480"])
    assert cli.trainer.callback_metrics["val/episode_return"] == 1
    assert cli.trainer.callback_metrics["val/episode_length"] == 5


def test_own_recurrent_policy_learns_from_the_distributions_that_acted():
    write_own_package()
    data = make_data("CartPole-v1", num_envs=3, rollout_length=64)
    model = importlib.import_module("my_package").RecurrentPPO(data.observation_space, data.action_space)
    before, errors = parameters_of(model), []
    model.after_update = lambda means: errors.append(means["first_ratio_error"])
    trainer = make_trainer(max_epochs=3)
    trainer.fit(model, data)
    assert len(errors) == 6 and max(errors) < 1e-5
    assert all((parameter != before[name]).any() for name, parameter in model.policy.named_parameters("policy"))
    assert make_trainer(limit_val_batches=1.0).validate(model, data)[0]["val/episodes"] == 2


def test_own_algorithm_takes_the_steps_of_a2c_which_has_the_same_loss():
    write_own_package()
    own, ends = importlib.import_module("my_package").Reinforce, []
    for algorithm, options in ((own, {"value_coef": 0.7}), (A2C, {"value_coef": 0.7, "entropy_coef": 0.0})):
        data = make_data("Pendulum-v1")
        torch.manual_seed(0)
        options = merged(
            options,
            {
                "optimizer": {"name": torch.optim.Adam},
                "learning_rate": 0.01,
                "normalization": {"values": "running_std"},
            },
        )
        model = algorithm(data.observation_space, data.action_space, **options)
        make_trainer(max_epochs=2).fit(model, data)
        ends.append(parameters_of(model))
    for name, parameter in ends[0].items():
        torch.testing.assert_close(parameter, ends[1][name], rtol=1e-5, atol=1e-6)


def test_loss_gradient_from_outside_is_the_step_of_an_update():
    """The entry points that docs/custom.md lists: one SGD step along the gradient of `loss` over `estimator.batch`."""
    write_own_package()
    page = importlib.import_module("my_package")
    model = page.Reinforce(
        VECTOR, DISCRETE, optimizer={"name": torch.optim.SGD, "max_grad_norm": None}, learning_rate=0.1
    )
    rollout, before = random_rollout(model.policy), parameters_of(model)
    gradients = page.gradient(model, rollout)
    assert all(gradient.any() for gradient in gradients.values())
    make_trainer(max_epochs=1).fit(model, FixedRollouts([rollout], model))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] - 0.1 * gradients[name])


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {' '.join(c)}" for page, c in COMMANDS])
def test_every_command_is_understood(page, command, capsys):
    write_own_package()
    if command[0] not in TRAINER_COMMANDS and not command[0].startswith("-"):
        assert make_parser(command[0]).parse_args(command[1:])
        return
    asks = ["--help", "--model.help", "--print_config"]
    with pytest.raises(SystemExit) as exit_:
        main(command if any(option in command for option in asks) else [*command, "--print_config"])
    assert exit_.value.code == 0
    assert len(capsys.readouterr().out) > 200


@pytest.mark.parametrize(("page", "content"), CONFIGURATIONS, ids=[page for page, _ in CONFIGURATIONS])
def test_every_piece_of_configuration_is_understood(page, content, capsys):
    Path("piece.yaml").write_text(content)
    write_own_package()
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", "configs/ppo/cartpole.yaml", "--config", "piece.yaml", "--print_config"])
    assert exit_.value.code == 0
    whole = yaml.load(capsys.readouterr().out, yaml.CSafeLoader)
    assert set(yaml.safe_load(content)) <= set(whole)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith(("http://", "https://", "../../actions/")):  # the last: workflows on GitHub
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


every_algorithm = pytest.mark.parametrize(
    ("page", "algorithm", "more"),
    [
        ("ppo", PPO, OnPolicyAlgorithm),
        ("a2c", A2C, A2C),
        ("ppo_kl", PPOKLPenalty, PPOKLPenalty),
        ("vmpo", VMPO, VMPO),
        ("ppg", PPG, PPG),
        ("offpolicyppg", OffPolicyPPG, OffPolicyPPG),
        ("impala", IMPALA, IMPALA),
        ("clear", CLEAR, CLEAR),
        ("distillation", Distillation, Distillation),
        ("rnd", RND, RND),
        ("mappo", MAPPO, MAPPO),
        ("behaviourcloning", BehaviourCloning, BehaviourCloning),
        ("criticpretraining", CriticPretraining, CriticPretraining),
    ],
)


def test_every_algorithm_has_a_page_that_the_readme_and_the_index_list():
    pages = {algorithm.__name__: page for page, algorithm, _ in every_algorithm.args[1]}
    on_other_pages = {"OnPolicyAlgorithm", "OverlappedPPO", "TFAgentsPPO"}
    without = set(algorithms.__all__) - set(pages) - on_other_pages
    assert not without, f"{without}: add the page to `every_algorithm` in this file"
    for file in ("README.md", "docs/algorithms/index.md"):
        text = (ROOT / file).read_text()
        assert [page for page in pages.values() if f"{page}.md)" not in text] == [], f"add a row to {file}"


@every_algorithm
def test_every_option_of_an_algorithm_is_in_its_page(page, algorithm, more):
    """That of PPO has those that all of them share."""
    text = (ROOT / f"docs/algorithms/{page}.md").read_text()
    described = set(re.findall(r"`([\w.]+)`", " ".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))))
    groups = default_groups(algorithm)
    of_groups = {name for name in described if "." in name}
    assert of_groups <= set(flat(groups, groups))
    options = {*inspect.signature(algorithm).parameters, *inspect.signature(more).parameters} - set(groups)
    options -= {"observation_space", "action_space", "kwargs", "unknown"}
    assert described - of_groups == options, f"the options in the tables of docs/algorithms/{page}.md"


@every_algorithm
def test_every_default_in_the_page_of_an_algorithm_is_that_of_its_class(page, algorithm, more):
    text = (ROOT / f"docs/algorithms/{page}.md").read_text()
    defaults = flat(defaults_of(algorithm), default_groups(algorithm))
    for names, written in re.findall(r"^\| (`[\w., `]+`) \| (.*?) \|", text, re.MULTILINE):
        options = re.findall(r"`([\w.]+)`", names)
        values = written.split(", ") * (1 if ", " in written else len(options))
        for option, value in zip(options, values, strict=True):
            if option in defaults:
                default = defaults[option]
                given = yaml.safe_load(re.sub(r"^none$", "null", value).replace("e-", ".0e-").strip("`"))
                assert given == (list(default) if isinstance(default, tuple) else default), option


def test_every_group_of_options_is_in_the_page_on_options():
    text = (ROOT / "docs/options.md").read_text()
    described = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(described) == sorted([*default_groups(PPO), *default_groups(RolloutDataModule)])


def test_every_option_of_the_data_is_described_somewhere_in_the_guide():
    text = " ".join(page.read_text() for page in PAGES)
    options = set(inspect.signature(RolloutDataModule).parameters)
    assert [name for name in sorted(options) if not re.search(rf"`{name}`|\b{name}: |--data\.{name}\b", text)] == []


def test_every_option_of_tf_agents_has_its_place_and_its_defaults():
    """The first table has a row for each, with the defaults of its three agents and those of three classes here."""
    theirs = load("tf_agents/00_option_defaults")
    text = (ROOT / "docs/coming_from_tf_agents.md").read_text().partition("## Options")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    table = {name: row[1:] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert set(table) == set(theirs["PPOAgent"])
    agents = ("PPOAgent", "PPOClipAgent", "PPOKLPenaltyAgent")
    for name, (*defaults, here, own) in table.items():
        for agent, written in zip(agents, defaults, strict=True):
            forced = theirs["forced_by_PPOClipAgent"] if agent == "PPOClipAgent" else {}
            assert written == str(forced.get(name, theirs[agent].get(name, "-"))).strip("<>"), (agent, name)
        if own == "-":
            continue
        for written, algorithm in zip(own.split("; "), (PPO, PPOKLPenalty, TFAgentsPPO), strict=True):
            option = re.findall(r"`([\w.]+)`", here)[0]
            default = flat(defaults_of(algorithm), default_groups(algorithm)).get(option, "-")
            assert written == str(default), (name, algorithm.__name__)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("ppo", []),
        ("vmpo", []),
        ("ppg", ["--model.num_policy_iterations=1"]),
        ("offpolicyppg", ["--model.num_policy_iterations=1", "--model.batch_size=32"]),
        ("clear", []),
    ],
)
def test_every_key_that_is_logged_is_in_the_page_about_logging(config, options):
    small = ["--data.num_envs=8", "--data.rollout_length=32", "--data.evaluation.episodes=1", "--max_env_steps=512"]
    small += ["--trainer.log_every_n_steps=1", *options]
    cli = main(["fit", f"--config=configs/{config}/cartpole.yaml", *small])
    text = (ROOT / "docs/logging.md").read_text()
    for key in set(cli.trainer.logged_metrics) - {"step", "epoch"}:
        group, _, rest = key.partition("/")
        known = f"`{key}`" in text or (group == "val" and f"`{rest}`" in text)
        extreme = re.fullmatch(r"(.*)_(min|max)", rest)
        assert known or (extreme and f"{extreme[1]}`" in text and f"`…_{extreme[2]}`" in text), key
