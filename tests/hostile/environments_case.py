"""Imports an upstream on hostile machines: `environments_case.py KIND MODE UID…`, in a fork each.

Prints one line of JSON: by user and machine, what the program saw without and with the overlay.
"""

import importlib
import json
import os
import py_compile
import sys
import warnings
from pathlib import Path

#: What is imported before, and what the hook waits for.
KINDS = {
    "bare": ((), "vllm.leaf"),
    "vllm": (("vllm.model_executor.model_loader.reload", "vllm.distributed.weight_transfer.packed_tensor"), None),
    "megatron": (("megatron.core", "megatron.core.transformer.module"), "megatron.core.transformer.module"),
}
#: Of the standard library and packaging, so that not every fork reads them again.
SHARED = (
    "ast difflib email.parser hashlib importlib.metadata importlib.resources inspect json multiprocessing.context "
    "multiprocessing.popen_fork packaging.version platform subprocess tempfile tokenize uuid"
)
LEAVES = {"vllm": "vllm.distributed.weight_transfer.packed_tensor"}


def no_home(folder):
    os.environ.pop("HOME", None)
    os.environ.pop("XDG_CACHE_HOME", None)


def tilde_home(folder):
    os.environ["HOME"] = "~"


def empty_home(folder):
    os.environ["HOME"] = ""


def relative_cache(folder):
    os.environ["XDG_CACHE_HOME"] = "~/cache"


def unsearchable(folder):
    """Only another user than root notices."""
    sys.path.insert(0, str(folder / "closed"))
    importlib.invalidate_caches()


def closed_stderr(folder):
    sys.stderr.close()


def no_stderr(folder):
    sys.stderr = None


def broken_showwarning(folder):
    def refuse(*_, **__):
        raise RuntimeError("no warnings here")

    warnings.showwarning = refuse


def exiting_showwarning(folder):
    warnings.showwarning = lambda *_, **__: sys.exit(3)


def errors(folder):
    warnings.simplefilter("error")


def closed_stderr_and_errors(folder):
    warnings.simplefilter("error")
    sys.stderr.close()


def run_dir_in_a_file(folder):
    os.environ["ULTRA_PATCHES_RUN_DIR"] = str(folder / "file" / "run")


def run_dir_closed(folder):
    os.environ["ULTRA_PATCHES_RUN_DIR"] = str(folder / "closed" / "run")


def run_dir_relative_in_a_lost_folder(folder):
    lost_folder(folder)
    os.environ["ULTRA_PATCHES_RUN_DIR"] = "run"


def run_dir_without_home(folder):
    no_home(folder)
    os.environ["ULTRA_PATCHES_RUN_DIR"] = str(folder / "everybody" / "run")


def cache_is_a_file(folder):
    os.environ["XDG_CACHE_HOME"] = str(folder / "file")


def cache_is_closed(folder):
    os.environ["XDG_CACHE_HOME"] = str(folder / "closed")


def cache_of_everybody(folder):
    os.environ["XDG_CACHE_HOME"] = str(folder / "everybody")


def lost_folder(folder):
    lost = folder / "everybody" / f"lost-{os.getpid()}"
    lost.mkdir()
    os.chdir(str(lost))
    lost.rmdir()


def odd_path(folder):
    sys.path[:0] = [None, 3, [], Path("/nowhere"), ""]


def odd_modules(folder):
    class Anything:
        def __getattribute__(self, name):
            raise RuntimeError("a proxy outside of its context")

    nameless = type(sys)("nameless")
    del nameless.__name__
    numbered = type(sys)("numbered")
    numbered.__name__ = 3
    sys.modules.update(
        {"odd_anything": Anything(), "odd_nameless": nameless, "odd_numbered": numbered, "odd_none": None}
    )


def no_arguments(folder):
    del sys.argv, sys.orig_argv


def odd_metadata(folder):
    """A distribution of somebody else whose entry points are neither UTF-8 nor a table."""
    sys.path.insert(0, str(folder / "metadata"))
    importlib.invalidate_caches()


MACHINES = [
    lambda folder: None,
    no_home,
    tilde_home,
    empty_home,
    relative_cache,
    unsearchable,
    closed_stderr,
    no_stderr,
    broken_showwarning,
    exiting_showwarning,
    errors,
    closed_stderr_and_errors,
    run_dir_in_a_file,
    run_dir_closed,
    run_dir_relative_in_a_lost_folder,
    run_dir_without_home,
    cache_is_a_file,
    cache_is_closed,
    cache_of_everybody,
    lost_folder,
    odd_path,
    odd_modules,
    no_arguments,
    odd_metadata,
]
#: With a real upstream, whose import takes long, several at once.
TOGETHER = [
    (no_home, closed_stderr_and_errors, run_dir_closed),
    (tilde_home, unsearchable, broken_showwarning, run_dir_in_a_file, cache_is_closed),
    (no_home, odd_path, odd_modules, no_arguments, odd_metadata, no_stderr, run_dir_without_home),
    (lost_folder, cache_of_everybody, exiting_showwarning, errors),
]
#: They are about the files of the upstream, so that a stub has them.
FILES = {
    "deep": "x = " + "-" * 6000 + "1\n",
    "zeros": "x = 1\0\n",
    "not utf-8": "x = '\udcff'\n",
}


def child(context):
    return context.Process(target=os.getpid)


def program(leaf, overlay, mode):
    """What a user's program does: import, start a child."""
    seen = {"import": "ok", "start": "ok"}
    os.environ["ULTRA_PATCHES"] = mode
    # There is something to complain of, so that the warnings matter.
    os.environ["ULTRA_PATCHES_DISABLE"] = "nonsense"
    try:
        if overlay:
            import ultra_patches
        importlib.import_module(leaf)
    except BaseException as error:
        seen["import"] = type(error).__name__
    try:
        import multiprocessing

        process = child(multiprocessing.get_context("fork"))
        process.start()
        process.join()
        seen["exit"] = process.exitcode
    except BaseException as error:
        seen["start"] = type(error).__name__
    if overlay and seen["import"] == "ok":
        try:
            seen["states"] = {row.id: row.state.value for row in ultra_patches.status()}
        except BaseException as error:
            seen["states"] = type(error).__name__
    return seen


def forked(uid, prepare, work):
    """What `work` gives in a fork of this process that belongs to another user, None where that does not end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if uid:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            prepare()
            os.write(writer, json.dumps(work()).encode())
            code = 0
        except BaseException:
            import traceback

            os.write(writer, json.dumps({"import": traceback.format_exc()}).encode())
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read()
    os.waitpid(pid, 0)
    return json.loads(said) if said else None


def main(kind, mode, *uids):
    folder = Path(sys.argv[0]).parents[1] / "hostile"
    before, leaf = KINDS[kind]
    leaf = leaf or LEAVES[kind]
    os.environ["ULTRA_PATCHES"] = "off"
    for name in (*SHARED.split(), *before):
        importlib.import_module(name)
    sys.modules.pop(leaf, None) if before else None

    def both(uid, prepare):
        return [forked(int(uid), prepare, lambda: program(leaf, overlay, mode)) for overlay in (False, True)]

    result = {}
    machines = TOGETHER if before else [(machine,) for machine in MACHINES]
    for uid in uids:
        for group in machines:
            name = "+".join("plain" if machine.__name__ == "<lambda>" else machine.__name__ for machine in group)
            result[f"{uid} {name}"] = both(uid, lambda: [machine(folder) for machine in group])
        for name, text in FILES.items() if kind == "bare" else ():
            path = Path(folder, "files", name)
            (path / "vllm").mkdir(parents=True, exist_ok=True)
            (path / "vllm" / "__init__.py").write_text("")
            leaf_file, function = path / "vllm" / "leaf.py", "def f():\n    return 1\n"
            if name == "deep":  # for the parser, but the program has bytecode and needs no parser
                leaf_file.write_text(function)
                py_compile.compile(str(leaf_file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
            leaf_file.write_bytes((text + function).encode(errors="surrogateescape"))
            result[f"{uid} {name}"] = both(uid, lambda: sys.path.insert(0, str(path)))
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
