"""What examples/proof/ changes, in small programs of the shape of the published ones."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import needs_installed, run_program, run_script

# `tox -e frameworks` runs them with torch.
pytestmark = pytest.mark.thorough

PROOF = Path(__file__).parents[2] / "examples" / "proof"
LIMIT = 110.0  # seconds; torch takes ten to be imported on a busy machine

# As a user runs it.
CHANGED = """
import runpy, sys
sys.argv = ["run.py", "{name}", "program.py"]
runpy.run_path({run!r}, run_name="__main__")
"""
TRAINING = """
import sys
import torch
import torch.utils.data
{imports}

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((3,), float(index))

torch.manual_seed(7)
model = torch.nn.Linear(3, 1)
loader = {loader}(Numbers(), batch_size=4, shuffle=True, num_workers=2)
print(type(loader).__module__.partition(".")[0], file=sys.stderr)
for epoch in range(2):
    for rows in loader:
        loss = model(rows).square().mean()
        loss.backward()
        print(loss.item().hex())
"""

PACKING = """
import numpy as np

def tokenizing_distributed_data_loader_with_state_bos_bestfit(
    tokenizer, B, T, split, device="cuda", resume_state_dict=None
):
    # One buffer for all batches, and a state that is exact to the file only.
    buffer = np.zeros((2, B, T), dtype=np.int64)
    inputs, targets = Tensor(buffer[0]), Tensor(buffer[1])
    for step in range(12):
        buffer[0] = tokenizer + step
        buffer[1] = tokenizer + step + 1
        yield inputs, targets, {"pq_idx": step // 4}

class Tensor:
    # What the program uses of torch's.
    def __init__(self, array):
        self.array = array

    def clone(self):
        return Tensor(self.array.copy())

    def to(self, device):
        assert device == "cpu"
        return self
"""
READING = """
import json
from nanochat.dataloader import tokenizing_distributed_data_loader_with_state_bos_bestfit as load

def read(resumed=None):
    return load(100, 2, 3, "train", device="cpu", resume_state_dict=resumed)

seen = []
for inputs, targets, state in read():
    assert (targets.array == inputs.array + 1).all()
    seen.append((int(inputs.array[0, 0]), json.loads(json.dumps(state))))
print([number for number, _ in seen])
if "enqueuer" in seen[0][1]:
    # The state of a batch resumes at this batch.
    print([int(inputs.array[0, 0]) for inputs, *_ in read(seen[5][1])])
"""

POLLING = """
import time
import numpy as np
from {module} import GeneratorEnqueuer

def generator(size):
    for number in range({fails_at}):
        yield np.full(size, number)
    raise ValueError("of the data")

def get_batch(num_workers, **kwargs):
    try:
        enqueuer = GeneratorEnqueuer(generator(**kwargs), use_multiprocessing=True)
        enqueuer.start(max_queue_size=10, workers=num_workers)
        generator_output = None
        while True:
            while enqueuer.is_running():
                if not enqueuer.queue.empty():
                    generator_output = enqueuer.queue.get()
                    break
                else:
                    time.sleep(0.01)
            yield generator_output
            generator_output = None
    finally:
        if enqueuer is not None:
            enqueuer.stop()

batches = get_batch(num_workers=1, size=3)
print([int(next(batches)[0]) for _ in range(6)])
next(batches)
"""
AUGMENTING = """
import numpy as np
from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as trainer

class Patches:
    # As `DataLoader` of batchgenerators with `infinite=True`.
    def set_thread_id(self, thread):
        self.thread = thread

    def __iter__(self):
        return self

    def __next__(self):
        return {"data": np.random.random(3), "thread": self.thread}

augmenter = trainer.NonDetMultiThreadedAugmenter(
    data_loader=Patches(), transform=None, num_processes=2, num_cached=6, seeds=None,
    pin_memory=False, wait_time=0.002,
)
for _ in range(6):
    batch = next(augmenter)
    print(batch["thread"], batch["data"].tolist())
augmenter._finish()
"""
COPY = 'raise AssertionError("the copy is not to be imported")'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep torch's cache of compiled code apart from the temporary files, which are counted."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


def write(folder, **files):
    """Write files, whose names have `__` for `/`."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def run_changed(folder, name):
    """Run program.py with the change; return its exit code, its output and its errors."""
    return run_program(folder, CHANGED.format(name=name, run=str(PROOF / "run.py")))


def check_same_losses(folder, name, imports="", loader="torch.utils.data.DataLoader"):
    write(folder, program=TRAINING.format(imports=imports, loader=loader))
    code, out, err = run_changed(folder, name)
    assert code == 0, err
    assert err == "enqueuer\n"
    code, out_unchanged, err = run_script(folder / "program.py", folder, LIMIT)
    assert code == 0, err
    assert err == "torch\n"
    assert out == out_unchanged
    assert out.count("\n") == 16


@pytest.mark.parametrize("name", ["imagenet", "unet"])
@pytest.mark.parametrize(
    ("imports", "loader"),
    [
        ("", "torch.utils.data.DataLoader"),
        ("from torch.utils.data import DataLoader", "DataLoader"),
    ],
    ids=["attribute", "import"],
)
def test_a_training_with_another_dataloader_has_the_same_losses(name, imports, loader, tmp_path):
    needs_installed("torch")
    check_same_losses(tmp_path, name, imports, loader)


def test_time_series_come_from_another_dataloader(tmp_path):
    needs_installed("torch")
    write(
        tmp_path,
        pytorch_forecasting__data__timeseries___timeseries="""
        from torch.utils.data import DataLoader
        """,
    )
    imports = "from pytorch_forecasting.data.timeseries import _timeseries"
    check_same_losses(tmp_path, "forecasting", imports, "_timeseries.DataLoader")


def test_nanochat_gets_the_same_tokens_and_resumes_at_the_very_batch(tmp_path):
    write(tmp_path, nanochat__dataloader=PACKING, program=READING)
    code, out, err = run_changed(tmp_path, "nanochat")
    assert code == 0, err
    whole, resumed = out.splitlines()
    assert resumed == str(list(range(105, 112)))
    code, out, err = run_script(tmp_path / "program.py", tmp_path, LIMIT)
    assert code == 0, err
    assert out.splitlines() == [whole] == [str(list(range(100, 112)))]


def test_east_reads_without_its_copy_and_gets_the_error_of_the_data(tmp_path):
    write(tmp_path, data_util=COPY, program=POLLING.format(module="data_util", fails_at=6))
    code, out, err = run_changed(tmp_path, "east")
    assert (code, out) == (1, "[0, 1, 2, 3, 4, 5]\n")
    assert "ValueError: of the data" in err


def test_ctpn_reads_without_its_copy_and_gets_the_error_of_the_data(tmp_path):
    program = POLLING.format(module="utils.dataset.data_util", fails_at=6)
    write(tmp_path, utils__dataset__data_util="GeneratorEnqueuer = None", program=program)
    code, out, err = run_changed(tmp_path, "ctpn")
    assert (code, out) == (1, "[0, 1, 2, 3, 4, 5]\n")
    assert "ValueError: of the data" in err


def test_the_augmentation_of_nnunet_is_repeatable(tmp_path):
    needs_installed("torch")
    module = "NonDetMultiThreadedAugmenter = None"
    write(tmp_path, nnunetv2__training__nnUNetTrainer__nnUNetTrainer=module, program=AUGMENTING)
    outputs = []
    for _ in range(2):
        code, out, err = run_changed(tmp_path, "nnunet")
        assert code == 0, err
        outputs.append(out.splitlines())
    assert outputs[0] == outputs[1]
    assert [line.split()[0] for line in outputs[0]] == ["0", "1"] * 3
    assert len(set(outputs[0])) == 6


def test_the_measurement_says_what_is_equal_and_what_is_left(tmp_path):
    needs_installed("torch")
    training = TRAINING.format(imports="", loader="torch.utils.data.DataLoader")
    write(tmp_path, imagenet__main=training)
    done = subprocess.run(
        [sys.executable, PROOF / "measure.py", "imagenet", tmp_path, "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    _, before, after, *repeated, are_equal, _, one, two, three = done.stdout.splitlines()
    killed = one, two, three
    assert before.startswith("before: ")
    assert after.startswith("after: ")
    assert after.endswith("left: 0 processes, 0 temporary files")
    for version, line in zip(("before", "after"), repeated, strict=True):
        assert line == f"{version}: the 16 results of all runs are equal: True"
    assert are_equal == "before and after are equal to the bit: True"
    assert "RuntimeError: DataLoader worker" in killed[0]
    assert "enqueuer.adapters.torch" in killed[1]
    assert "SIGKILL" in killed[1]
    assert killed[2].startswith("after, max_restarts=1: 16 steps")
    for line in killed:
        assert "results equal so far: True" in line
    # torch's own loader leaves a folder; that of enqueuer leaves nothing.
    for line in killed[1:]:
        assert line.endswith("; left: 0 processes, 0 temporary files")
