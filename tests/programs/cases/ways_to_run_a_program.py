"""multiprocess#19, spyder#16696, datasets#5363-like, pytest's importlib mode: the same program run as a script, by -m with
relative imports, by runpy, from stdin, by -c, as a module loaded from a path (as configuration systems and pytest do),
from a zip file."""

import os
import subprocess
import sys
import tempfile
import zipfile

BODY = """
import os, pathlib
from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes
K = 3
def helper(i):
    return i * K
def rows(shard):
    %(relative)s
    for i in shard.split(range(4)):
        yield helper(i)
def where():
    yield str(pathlib.Path(__file__).name) if "__file__" in globals() else "none"
def run():
    out = []
    for method in ("fork", "forkserver", "spawn"):
        with GeneratorEnqueuer(rows, workers=1, backend=Processes(start_method=method)) as e:
            out.append([int(x) for x in e])
        with GeneratorEnqueuer(where, backend=Processes(start_method=method)) as e:
            out.append(list(e) == list(where()))
    print(out, flush=True)
"""
WANT = str([[0, 3, 6, 9], True] * 3)
problems = []
with tempfile.TemporaryDirectory() as folder:

    def write(name, text):
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            f.write(text)
        return path

    script = write("script.py", BODY % {"relative": "pass"} + "run()\n")
    write("pkg/__init__.py", "")
    write("pkg/other.py", "X = 1\n")
    write(
        "pkg/main.py",
        BODY % {"relative": "from . import other; from .other import X"}
        + "if __name__ == '__main__':\n    run()\n",
    )
    loaded = write("elsewhere/loaded.py", BODY % {"relative": "pass"})
    archive = os.path.join(folder, "app.zip")
    with zipfile.ZipFile(archive, "w") as z:
        z.writestr("__main__.py", BODY % {"relative": "pass"} + "run()\n")
    load = f"import importlib.util; s = importlib.util.spec_from_file_location('my_config', {loaded!r}); m = importlib.util.module_from_spec(s); %s s.loader.exec_module(m); m.run()"
    cases = {
        "script": ([script], None),
        "-m": (["-m", "pkg.main"], None),
        "runpy": (["-c", f"import runpy; runpy.run_path({script!r}, run_name='__main__')"], None),
        "stdin": (["-"], BODY % {"relative": "pass"} + "run()\n"),
        "-c": (["-c", BODY % {"relative": "pass"} + "run()\n"], None),
        "zip": ([archive], None),
        "loaded from a path, in sys.modules": (
            ["-c", load % "import sys; sys.modules['my_config'] = m;"],
            None,
        ),
        "loaded from a path": (["-c", load % ""], None),
        "exec": (
            ["-c", f"ns = {{'__name__': '__main__'}}; exec(open({script!r}).read(), ns)"],
            None,
        ),
    }
    for name, (args, text) in cases.items():
        done = subprocess.run(
            [sys.executable, *args],
            cwd=folder,
            input=text,
            capture_output=True,
            text=True,
            timeout=50,
        )
        if done.stdout.strip() != WANT:
            problems.append(
                f"{name}: {done.stdout.strip()} {done.stderr.strip().splitlines()[-1][:170] if done.stderr.strip() else ''}"
            )
print("FAIL: " + "; ".join(problems) if problems else "ok")
