"""A stage of another host joins a ring whose experts are shared: it has a coordinator of its own."""

import re
import shutil
from pathlib import Path

from tests.e2e.swarm_world import Load, World, WorldOptions, until
from tests.rt.hosts import two_hosts
from tests.rt.swarm.swarms import wait_for
from tests.rt.tiny_models import TinyModel

MODEL = TinyModel(architecture="qwen3moe", layers=2, experts=16, experts_used=4)
WAITS = re.compile(r"stages join at (\S+) with the token (\S+)")
CLIENTS, TOKENS = 4, 12


def test_a_joined_stage_sends_its_experts_to_workers_and_the_text_stays(tmp_path: Path) -> None:
    with two_hosts() as (namespace, theirs, ours):
        made = World(tmp_path, WorldOptions(model=MODEL, faster=20, base=1, boost=0, host=ours))
        try:
            made.start_hub()
            server = made.begin_server("--remote", "1", "--ring-listen", f"{ours}:0")
            _join(made, namespace, theirs)
            made.await_server(server)
            assert {stage["host"] for stage in made.ring()["stages"]} != {""}
            prompts = [f"client {k}: tell me" for k in range(CLIENTS)]
            right = {prompt: made.complete(prompt, TOKENS) for prompt in prompts}
            assert made.ring()["swarm"]["pairs"]["remote"] == 0
            made.start_worker("a", "--max-experts", "32")
            with Load(made, CLIENTS, TOKENS) as load:
                until("both layers are served", lambda: _replicas(made) == {1})
                until("the joined stage gets answers", lambda: _remote_pairs(made)[1] > 100)
                until("and so does ours", lambda: _remote_pairs(made)[0] > 100)
                load.wait_rounds(CLIENTS)
            assert not load.errors
            assert load.texts == {prompt: {text} for prompt, text in right.items()}
            swarm = made.ring()["swarm"]
            assert swarm["mismatches"] == 0
            assert all(each["is_connected"] for each in swarm["coordinators"])
            names = [
                c["coordinator"] for c in made.get(f"{made.hub_url}/api/swarm")["coordinators"]
            ]
            assert sorted(name.rpartition("/")[2] for name in names) == ["0", "1"]
        except BaseException:
            print(made.logs())
            raise
        finally:
            made.close()


def _join(made: World, namespace: str, theirs: str) -> None:
    """From its own host, with a copy of the model that lies elsewhere."""
    log = made.root / "serve.txt"
    wait_for("the bridge waits", lambda: WAITS.search(log.read_text()))
    found = WAITS.search(log.read_text())
    assert found is not None
    home = made.root / "elsewhere"
    home.mkdir()
    token = home / "join.token"
    token.touch(mode=0o600)
    token.write_text(found[2])
    copy = shutil.copy(made.model_file, home / "copy.gguf")
    made.run(
        "stage", "--join", found[1], "--listen", f"{theirs}:0", "--model", str(copy),
        "--token-file", str(token), prefix=("ip", "netns", "exec", namespace),
    )  # fmt: skip


def _replicas(made: World) -> set[int]:
    return {segment["replicas"] for segment in made.segments()}


def _remote_pairs(made: World) -> list[int]:
    return [each["pairs"]["remote"] for each in made.ring()["swarm"]["coordinators"]]
