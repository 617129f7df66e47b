"""The guide as a site: it builds without a warning, is complete, and all code on it is run."""

import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import lightning.pytorch
import pytest
import torch
from lightning.pytorch import Trainer

import lightning_rl
from lightning_rl import PPO, RolloutDataModule
from lightning_rl.options import default_groups, defaults_of, flat
from tests.checkpointing.test_failed_update import OPTIONS, BrokenRollouts, fail
from tests.helpers import DISCRETE, VECTOR
from tests.test_readme import PAGES, ROOT, TRAIN, commands, name

SITE_PAGES = [page for page in PAGES if page.parent != ROOT]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>.*) -->\n)?^ *```(?P<language>.*)\n(?P<code>(?s:.*?))^ *```$", re.MULTILINE
)
# Pages whose blocks have tests of their own in tests/test_readme.py, which look at what comes out.
TESTED_ELSEWHERE = ("getting_started", "coming_from_tf_agents", "export", "logging", "custom", "watching")
PUBLIC = ("", ".functional", ".policies.distributions", ".environments")
PROGRAMS = ("ray", "pip", "python", "tensorboard", "jupyter", "pytest", "source", "cd")
COMING_FROM = {
    "stable_baselines3": {"PPO": "PPO", "A2C": "A2C"},
    "cleanrl": {"PPO": "PPO", "PPG": "PPG"},
    "di_engine": {"PPO": "PPO", "A2C": "A2C", "IMPALA": "IMPALA", "PPG": "PPG"},
    "torchrl": {"TorchRL": "PPO", "Tianshou": "PPO", "RLlib PPO": "PPOKLPenalty", "RLlib IMPALA": "IMPALA"},
}


class ShortTrainer(Trainer):
    """One epoch of two rollouts, where the code says no limit of its own, and no validation but what is asked for."""

    def __init__(self, **options):
        epochs = {"max_epochs": min(1, options.get("max_epochs", 1)), "limit_train_batches": 2}
        super().__init__(**options | epochs, accelerator="cpu", check_val_every_n_epoch=2, num_sanity_val_steps=0)


def blocks_of(page):
    return [match.groupdict() for match in BLOCK.finditer(page.read_text())]


def id_of(page):
    return str(page.relative_to(ROOT / "docs")).removesuffix(".md")


SCRIPTS = [
    page
    for page in SITE_PAGES
    if page.stem not in TESTED_ELSEWHERE
    and any(block["language"] == "python" and block["why"] is None for block in blocks_of(page))
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # news of the theme, which is no warning about the site
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.html")}


def test_the_site_has_every_page_in_its_navigation(site):
    assert {f"{id_of(page)}.html" for page in SITE_PAGES} <= set(site)
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = set(re.findall(r"[\w/]+\.md", navigation))
    assert listed == {f"{id_of(page)}.md" for page in SITE_PAGES} | {"repository/benchmarks/README.md"}


def test_the_site_asks_nothing_of_other_hosts(site):
    for page, text in site.items():
        tags = re.findall(r"<(?:script|img|iframe|link(?=[^>]*stylesheet))[^>]*>", text)
        fetched = [tag for tag in tags if re.search(r'(?:src|href)="?https?:', tag)]
        assert fetched == [], page


def test_formulas_need_no_script(site):
    assert sum(text.count("<math") for text in site.values()) > 80
    for page, text in site.items():
        prose = re.sub(r"<(code|pre|annotation)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert "arithmatex" not in prose and not re.search(r"\$\$|\\(frac|mathrm|hat)\b", prose), page


def test_links_to_files_of_the_repository_lead_to_pages_that_show_them(site):
    shown = site["repository/configs/ppo/cartpole.yaml.html"]
    assert "num_minibatches" in shown
    assert 'href="../repository/configs/ppo/cartpole.yaml.html"' in site["algorithms/ppo.html"]
    assert 'href="../../docs/' not in site["repository/benchmarks/index.html"]
    assert 'href="../configs/ppo/cartpole.yaml.html"' in site["repository/benchmarks/index.html"]
    notebook = site["repository/examples/notebook.ipynb.html"]
    assert (
        "<h1" in notebook and "cell_type" not in notebook and "torch.set_num_threads" in re.sub("<[^>]*>", "", notebook)
    )


def test_every_public_name_is_in_the_reference(site):
    reference = "".join(text for page, text in site.items() if page.startswith("reference/"))
    anchors = set(re.findall(r'id="?(lightning_rl\.[\w.]+)', reference))
    modules = [importlib.import_module(f"lightning_rl{part}") for part in PUBLIC]
    aliases = {"Backend", "EnvOptions", "OnEnvFailure", "RewardClip"}  # of types: without a docstring
    for module in modules:
        for shown in set(module.__all__) - {"__version__", "functional"} - aliases:
            places = [*(public.__name__ for public in modules), getattr(getattr(module, shown), "__module__", "")]
            is_there = any(f"{place}.{shown}" in anchors for place in places)
            assert is_there, f"add the line ::: {module.__name__}.{shown} to a page of docs/reference/"


def test_methods_that_the_guide_says_to_override_have_a_docstring():
    table = (ROOT / "docs/custom.md").read_text().partition("### Methods to override")[2].partition("###")[0]
    methods = re.findall(r"^\| `(\w+)\(", table, re.MULTILINE)
    assert {"make_policy", "make_estimator", "surrogate_loss"} <= {*methods}
    assert [name for name in methods if not getattr(PPO, name).__doc__] == []


def test_every_block_says_what_it_is_and_few_are_not_run():
    found = [(name(page), block) for page in PAGES for block in blocks_of(page)]
    assert len(found) > 70
    for page, block in found:
        assert block["language"] in {"python", "bash", "yaml", "text"}, (page, block["code"])
    excused = [(page, block["why"]) for page, block in found if block["why"] is not None]
    assert all(why.startswith("needs ") for _, why in excused)
    assert len(excused) <= 8, excused
    assert sum(block["language"] == "text" for _, block in found) <= 8  # output, folders: nothing to run


def test_every_line_for_the_shell_is_of_a_program_that_is_there():
    for page in PAGES:
        parsed = 0
        for block in blocks_of(page):
            if block["language"] != "bash" or block["why"] is not None:
                continue
            for line in re.sub(r"\\\n\s*", "", block["code"]).splitlines():
                line = line.partition(" #")[0].strip()
                if not line or line.startswith("#") or line == TRAIN:
                    continue
                ours = "lightning-rl " in line or "-m lightning_rl " in line
                parsed += ours
                assert ours or line.split()[0] in PROGRAMS, (page, line)
                for named in re.findall(r"(?:examples|benchmarks|tests|configs)/[\w/.]+", line):
                    assert (ROOT / named).exists(), (page, line)
        assert parsed == len(commands(page)), page  # tests/test_readme.py has them all understood


@pytest.fixture
def as_in_a_script(in_tmp_path, monkeypatch):
    """The namespace of a module that classes defined on a page can be imported from, as from `__main__` of a script."""
    monkeypatch.setattr(lightning.pytorch, "Trainer", ShortTrainer)
    module = ModuleType("code_of_the_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield vars(module)


def before(page, namespace):
    """What the text before a page's code takes for granted."""
    if page.stem == "behaviourcloning":
        data = RolloutDataModule("CartPole-v1", num_envs=4, rollout_length=64)
        namespace["expert"] = PPO(data.observation_space, data.action_space)
    if page.stem == "coming_from_stable_baselines3":  # what Stable-Baselines3 2.9 saves for CartPole
        layers = [("mlp_extractor.policy_net.0", 64, 4), ("mlp_extractor.policy_net.2", 64, 64), ("action_net", 2, 64)]
        layers += [("mlp_extractor.value_net.0", 64, 4), ("mlp_extractor.value_net.2", 64, 64), ("value_net", 1, 64)]
        theirs = {f"{name}.weight": torch.randn(*shape) for name, *shape in layers}
        theirs |= {f"{name}.bias": torch.randn(rows) for name, rows, _ in layers}
        with zipfile.ZipFile("cartpole.zip", "w") as archive, archive.open("policy.pth", "w") as file:
            torch.save(theirs, file)
    if page.stem == "resuming":
        saved = fail(BrokenRollouts(VECTOR, DISCRETE, broken=[0], **OPTIONS), Path())
        wanted = re.search(r'FailedUpdate\.load\("(.*)"\)', page.read_text())[1]
        Path(wanted).parent.mkdir(parents=True)
        saved.rename(wanted)
    return namespace


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", SCRIPTS, ids=id_of)
def test_every_script_runs(page, as_in_a_script):
    namespace = before(page, as_in_a_script)
    for block in blocks_of(page):
        if block["language"] == "python" and block["why"] is None:
            shortened = re.sub(r"\b\d+0_000\b", "512", block["code"])
            exec(compile(shortened, str(page), "exec"), namespace)
    if page.stem.startswith("coming_from"):
        assert namespace["trainer"].lightning_module.env_steps == 512
    if page.stem == "coming_from_stable_baselines3":
        assert namespace["action"].shape == (1,) and "val/episode_return" in namespace["metrics"]
        theirs, x = namespace["theirs"], torch.randn(8, 4)
        expected = []
        for names in (("policy_net.0", "policy_net.2"), ("value_net.0", "value_net.2")):
            of_half = x
            for name in names:
                weight, bias = (theirs[f"mlp_extractor.{name}.{kind}"] for kind in ("weight", "bias"))
                of_half = (of_half @ weight.T + bias).tanh()
            head = "action_net" if names[0] == "policy_net.0" else "value_net"
            expected.append(of_half @ theirs[f"{head}.weight"].T + theirs[f"{head}.bias"])
        distribution, values = namespace["model"].policy(x)
        torch.testing.assert_close(distribution.logits.softmax(-1), expected[0].softmax(-1))
        torch.testing.assert_close(values, expected[1].squeeze(-1))
    if page.stem == "behaviourcloning":
        assert isinstance(namespace["model"], PPO) and namespace["model"].env_steps == 2048
    if page.stem == "policies":
        assert namespace["memory"]["actor"].abs().sum() > 0
    if page.stem == "recipes":
        assert namespace["student"].env_steps > 0 and namespace["metrics"]["val/episode_return"] > 0
        assert len(list(Path("sweep").rglob("events*"))) == 4
        logged = namespace["trainer"].lightning_module.losses
        assert "policy_loss" in logged
    if page.stem == "resuming":
        assert "policy_loss" in namespace["failed"].replay()
    if page.stem == "one_rollout":
        in_process, _, elsewhere = page.read_text().partition("## What differs with worker processes")
        listed = re.findall(r"^\d+\. `([\w/]+\.py)`:", in_process, re.MULTILINE)
        assert sorted(listed) == sorted(namespace["trace"].files)
        others = re.findall(r"`([\w/]+/\w+\.py)`", elsewhere)
        assert len(others) == 3 and all((ROOT / "lightning_rl" / other).exists() for other in others)


def test_the_table_of_third_party_packages_shows_every_result():
    results = json.loads((ROOT / "benchmarks/results/third_party.json").read_text())["packages"]
    text = (ROOT / "docs/third_party.md").read_text()
    assert sum("steps_per_cpu_second" in result for result in results) >= 20
    for result in results:
        assert f"`{result['data']['env_id']}`" in text, "run python benchmarks/third_party.py --page"


def default_of(option, algorithm):
    for cls in (algorithm, RolloutDataModule):
        if option in (defaults := flat(defaults_of(cls), default_groups(cls))):
            return defaults[option]
    raise KeyError(option)


@pytest.mark.parametrize("page", COMING_FROM)
def test_what_other_libraries_options_are_called_here_is_there_with_its_default(page):
    text = (ROOT / f"docs/coming_from_{page}.md").read_text()
    for heading, algorithm in COMING_FROM[page].items():
        section = re.search(rf"^## {heading}$(.*?)^## ", text, re.MULTILINE | re.DOTALL)[1]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "| `" in line]
        compared = [row[2:] for row in rows if len(row) == 4 and row[3] != "-"]
        assert len(compared) >= 4
        for here, written in compared:
            options = re.findall(r"`([\w.]+)`", re.search(r"`[\w.]+`(?: · `[\w.]+`)*", here)[0])
            defaults = [str(default_of(option, getattr(lightning_rl, algorithm))) for option in options]
            assert written == " · ".join(defaults), (heading, options)


def test_the_notebook_trains_and_shows_an_episode(monkeypatch, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("50_000", "1_024").replace("evaluation.episodes=20", "evaluation.episodes=2")
    nbclient.NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    # One line of progress, the last one, and not one for each time that it was drawn.
    progress = [json.dumps(output) for outputs in cells for output in outputs if "env steps" in json.dumps(output)]
    assert len(progress) == 1
    assert "Training: 100%" in progress[0] and "1.02k/1.02k" in progress[0]
    assert float(cells[2][-1]["data"]["text/plain"]) > 0
    assert cells[3][-1]["data"]["image/gif"].startswith("R0lGODlh")  # GIF89a
    assert all("error" not in output["output_type"] for outputs in cells for output in outputs)
