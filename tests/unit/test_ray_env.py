"""A user's runtime_env keeps what it says, gets the driver's settings and our hook, and no secret unasked."""

from __future__ import annotations

import functools
import os
import pickle
import string
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultra_patches import UltraPatchesError
from ultra_patches.core import overlay
from ultra_patches.entrypoints import ray as entry
from ultra_patches.entrypoints.ray import HOOK, USER_HOOK, VLLM_PREFIXES, Chained, runtime_env

from .site_dir import Site

SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_tail = st.text(string.ascii_letters + string.digits + "_", max_size=8)
_head = st.sampled_from(
    ["ULTRA_PATCHES_", "VLLM_", "HF_", "HUGGING_FACE_", "NCCL_", "FI_", "RAY_timeout_", "RAY_", "TRITON_CACHE_DIR", ""]
)
_middle = st.sampled_from(["", *SECRET_WORDS, *(word.lower() for word in SECRET_WORDS), "TOKENS_", "APIKEY"])
_names = st.builds(lambda *parts: "".join(parts), _head, _tail, _middle, _tail).filter(bool)
_environs = st.dictionaries(_names, st.text(max_size=4).map(lambda text: f"driver {text}"), max_size=12)
_own = st.dictionaries(_names, st.text(max_size=4).map(lambda text: f"user {text}"), max_size=6)


def variables(environ: dict[str, str], given: dict[str, Any] | None = None, **more: Any) -> dict[str, str]:
    made: dict[str, str] = runtime_env(given, environ, **more)["env_vars"]
    return made


def theirs() -> None:
    """A hook that has a name."""


@given(_own, _environs, st.sets(_names, max_size=3))
def test_the_users_own_value_always_wins(own: dict[str, str], environ: dict[str, str], secrets: set[str]) -> None:
    got = variables(environ, {"env_vars": own}, secrets=secrets)
    assert {name: got[name] for name in own} == own
    assert all(got[name] == environ[name] for name in got.keys() - own.keys() - {VLLM_PREFIXES})


@given(_own, _environs, st.data())
def test_no_secret_goes_along_unasked(own: dict[str, str], environ: dict[str, str], data: st.DataObject) -> None:
    asked = data.draw(st.sets(st.sampled_from(sorted(environ)))) if environ else set()
    got = variables(environ, {"env_vars": own}, secrets=asked)
    held_back = {n for n in environ if any(word in n.upper() for word in SECRET_WORDS)} - asked - own.keys()
    assert not held_back & got.keys()
    assert asked <= got.keys()


@given(_own, _environs)
def test_twice_is_as_once_and_changes_nothing_given(own: dict[str, str], environ: dict[str, str]) -> None:
    for hook in (None, "users.hook", theirs, Chained(theirs), HOOK):
        given_env = {"env_vars": dict(own), "pip": ["x"], "worker_process_setup_hook": hook}
        once = runtime_env(given_env, environ)
        assert runtime_env(once, environ) == once
        assert given_env == {"env_vars": own, "pip": ["x"], "worker_process_setup_hook": hook}
        assert once["pip"] == ["x"]


@pytest.mark.parametrize(
    "name",
    [
        *("ULTRA_PATCHES", "ULTRA_PATCHES_DISABLE", "ULTRA_PATCHES_RUN_DIR", "HF_HOME", "HUGGING_FACE_HUB_CACHE"),
        *("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "NCCL_DEBUG"),
        *("FI_PROVIDER", "RAY_health_check_timeout_ms", "RAY_gcs_rpc_server_reconnect_timeout_s"),
    ],
)
def test_forwarded(name: str) -> None:
    assert variables({name: "x"})[name] == "x"


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "RAY_JOB_ID", "HOME", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"),
        *("VLLM_HOST_IP", "VLLM_PORT", "VLLM_DP_RANK", "VLLM_API_KEY", USER_HOOK),
    ],
)
def test_left_behind(name: str) -> None:
    assert name not in variables({name: "x"})


def test_a_secret_that_is_asked_for() -> None:
    environ = {"HF_TOKEN": "h", "WANDB_API_KEY": "w", "VLLM_API_KEY": "v"}
    got = variables(environ, secrets=["HF_TOKEN", "WANDB_API_KEY", "NOT_SET_KEY"])
    assert {**got, VLLM_PREFIXES: ""} == {"HF_TOKEN": "h", "WANDB_API_KEY": "w", VLLM_PREFIXES: ""}
    assert variables(environ, secrets="HF_TOKEN")["HF_TOKEN"] == "h", "a text is one name, not its letters"


@pytest.mark.parametrize(
    ("driver", "user", "merged"),
    [
        (None, None, "ULTRA_PATCHES"),
        ("MY_, OTHER_", None, "MY_,OTHER_,ULTRA_PATCHES"),
        ("MY_", "USERS_", "USERS_,ULTRA_PATCHES"),
        (None, "ULTRA_PATCHES,USERS_,", "ULTRA_PATCHES,USERS_"),
        ("", "", "ULTRA_PATCHES"),
    ],
)
def test_the_prefixes_that_vllm_copies_are_added_to(driver: str | None, user: str | None, merged: str) -> None:
    environ = {} if driver is None else {VLLM_PREFIXES: driver}
    assert variables(environ, {"env_vars": {} if user is None else {VLLM_PREFIXES: user}})[VLLM_PREFIXES] == merged


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULTRA_PATCHES_DISABLE", "x")
    assert runtime_env()["env_vars"]["ULTRA_PATCHES_DISABLE"] == "x"
    assert runtime_env()["worker_process_setup_hook"] == "ultra_patches.entrypoints.ray.setup"


def test_a_named_hook_is_kept_by_name() -> None:
    made = runtime_env({"worker_process_setup_hook": "users.hook"}, {})
    assert (made["worker_process_setup_hook"], made["env_vars"][USER_HOOK]) == (HOOK, "users.hook")


@pytest.mark.parametrize("hook", [theirs, functools.partial(theirs)])
def test_a_callable_hook_is_wrapped(hook: Callable[[], None]) -> None:
    """Ray asks each for `__name__`, which a partial has not."""
    made = runtime_env({"worker_process_setup_hook": hook, "env_vars": {USER_HOOK: "stale.hook"}}, {})
    chained = made["worker_process_setup_hook"]
    assert USER_HOOK not in made["env_vars"]
    assert chained.hook is hook
    assert chained.__name__ in ("ultra_patches after theirs", "ultra_patches after partial")
    assert pickle.loads(pickle.dumps(Chained(theirs))) == Chained(theirs)


def test_what_ray_noted_at_an_earlier_init_does_not_refuse_the_next() -> None:
    assert not [name for name in variables({}, {"env_vars": {entry._RAY_NOTE: "x"}}) if name.startswith("__RAY")]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"worker_process_setup_hook": 3}, "worker_process_setup_hook'] is a int: give 'package.module.function'"),
        ({"env_vars": ["HF_TOKEN=hf_secret"]}, "env_vars'] is a list: give a dict"),
    ],
)
def test_what_ray_cannot_use_is_told_in_one_line_without_values(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UltraPatchesError) as caught:
        runtime_env(wrong, {"HF_TOKEN": "hf_secret"})
    assert said in str(caught.value)
    assert "hf_secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, load: Callable[..., ModuleType]) -> list[str]:
    """What ran, in order; `toy_hooks.hook` and `toy_hooks.broken` are the user's."""
    made: list[str] = []
    monkeypatch.setattr(overlay, "disarm", lambda: made.append("disarm"))
    monkeypatch.setattr(overlay, "arm", lambda: made.append("arm"))
    module = load(
        "toy_hooks",
        """
        import os

        def hook():
            calls.append("theirs")
            os.environ["ULTRA_PATCHES"] = mode

        def broken():
            raise LookupError("theirs")
        """,
    )
    vars(module).update(calls=made, mode="warn")
    return made


@pytest.mark.parametrize("way", ["named", "callable"])
@pytest.mark.parametrize(("was", "becomes", "ours"), [("off", "strict", ["disarm", "arm"]), ("warn", "off", [])])
def test_theirs_runs_and_then_ours(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, way: str, was: str, becomes: str, ours: list[str]
) -> None:
    """What the package armed when Ray found the hook stays, but where only their hook turns it on."""
    import toy_hooks  # type: ignore[import-not-found]

    toy_hooks.mode = becomes
    monkeypatch.setenv("ULTRA_PATCHES", was)
    monkeypatch.setenv(USER_HOOK, "toy_hooks.hook" if way == "named" else "")
    entry.setup() if way == "named" else Chained(toy_hooks.hook)()
    assert calls == ["theirs", *ours]


def test_what_their_hook_raises_is_not_hidden(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER_HOOK, "toy_hooks.broken")
    with pytest.raises(LookupError):
        entry.setup()
    monkeypatch.setenv(USER_HOOK, "toy_hooks.absent")
    with pytest.raises(AttributeError):
        entry.setup()


def test_setup_alone_does_nothing_more_than_the_import(calls: list[str]) -> None:
    assert USER_HOOK not in os.environ
    entry.setup()
    assert calls == []


def test_the_module_imports_no_ray(site: Site) -> None:
    """Though it is called the same."""
    site.write("ray")
    assert (
        site.ask(f"""
        import sys, importlib
        module, _, name = "{HOOK}".rpartition(".")
        getattr(importlib.import_module(module), name)()
        report("ray" in sys.modules)
    """)
        is False
    )
