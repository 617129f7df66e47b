"""A warning about Gymnasium's own models is dropped, every other one is shown."""

from pathlib import Path

import pytest

from lightning_rl.environments import EnvironmentSpec
from lightning_rl.environments.make import make_single
from lightning_rl.environments.mujoco_models import quiet_loading
from lightning_rl.environments.registry import find_spec
from tests import programs

mujoco = pytest.importorskip("mujoco")
CHEETAH = find_spec("HalfCheetah-v5")
# One that MuJoCo 4 warns of, and that MuJoCo 3 knows nothing wrong with.
OLD_MODEL = '<mujoco><compiler settotalmass="14"/><worldbody><body><geom size="1"/></body></worldbody></mujoco>'


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load_old_model():
    mujoco.MjModel.from_xml_string(OLD_MODEL)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_making_a_cheetah_prints_nothing_and_leaves_no_file(backend, tmp_path):
    # MuJoCo writes past sys.stdout; a process of its own shows what a terminal would.
    code = f"from tests.probes import make_batch; make_batch('HalfCheetah-v5', 2, backend={backend!r}).close()"
    code = f"import warnings; warnings.simplefilter('ignore'); {code}"
    done = programs.run("-c", code, env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(int(mujoco.__version__.partition(".")[0]) < 4, reason="says nothing about it")
def test_model_of_the_users_own_and_other_environments_warn_as_ever():
    for spec, kwargs in ((CHEETAH, {"xml_file": "mine.xml"}), (find_spec("CartPole-v1"), {})):
        with quiet_loading(spec, kwargs):
            load_old_model()
    assert len(Path("MUJOCO_LOG.TXT").read_text().split("settotalmass")) == 3
    with quiet_loading(CHEETAH, {}):
        load_old_model()
    assert len(Path("MUJOCO_LOG.TXT").read_text().split("settotalmass")) == 3


def test_other_warnings_are_shown_while_a_model_is_loaded(capfd):
    with quiet_loading(CHEETAH, {}):
        mujoco.get_mju_user_warning()("the model is odd")
    assert capfd.readouterr().err == "WARNING: the model is odd\n\n"
    assert "WARNING" in (log := Path("MUJOCO_LOG.TXT").read_text()) and "the model is odd" in log


def test_handler_of_the_users_own_gets_the_others_and_is_put_back():
    heard = []
    mujoco.set_mju_user_warning(heard.append)
    try:
        with quiet_loading(CHEETAH, {}):
            mujoco.get_mju_user_warning()("the model is odd")
            mujoco.get_mju_user_warning()("compiler attribute 'settotalmass' is deprecated and so on")
        mujoco.get_mju_user_warning()("later")
    finally:
        mujoco.set_mju_user_warning(None)
    assert heard == ["the model is odd", "later"]


def test_unstable_simulation_is_still_warned_of(capfd):
    env = make_single(EnvironmentSpec("HalfCheetah-v5"), CHEETAH, ())
    env.reset(seed=0)
    env.unwrapped.data.qpos[0] = 1e20
    mujoco.mj_step(env.unwrapped.model, env.unwrapped.data)
    assert "The simulation is unstable" in Path("MUJOCO_LOG.TXT").read_text()
    assert "The simulation is unstable" in "".join(capfd.readouterr())
    env.close()
