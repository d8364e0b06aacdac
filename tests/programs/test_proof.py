"""What examples/proof/ changes, in small programs of the shape of the published ones."""

import os
import re
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
PACKS = """
import torch

class ConstantLengthDataset(torch.utils.data.IterableDataset):
    # What the change takes of the program's class.
    epoch, queue_size = 0, 8
    seq_length, max_length = 20, 40
    max_sample_length, max_images_per_example, max_images_per_knapsack = 9, 1, 4

    def __init__(self, dataset, infinite=False):
        self.dataset, self.infinite = dataset, infinite

    def __iter__(self):
        raise AssertionError("it is not to be called")

    def _balanced_greedy_knapsack(self, buffer, L, delta=0, max_images_per_knapsack=None):
        assert (L, delta, max_images_per_knapsack) == (20, 5, 4)
        indices = range(len(buffer))
        return [indices[start : start + 2] for start in range(0, len(buffer), 2)]

    def _pack_one_group(self, group_indices, batch, max_len):
        assert max_len == 20
        keys = "input_ids", "labels", "attention_mask"
        packed = [torch.cat([batch[i][key] for i in group_indices]) for key in keys]
        return *packed, sum((batch[i]["images"] for i in group_indices), [])
"""
QUESTIONS = """
import sys
from types import SimpleNamespace
import torch
from data.advanced_datasets import ConstantLengthDataset

class Questions:
    # Number 5 is filtered out, 6 is too long, and 7 has too many images.
    dataset = range(20)
    tokenizer = SimpleNamespace(pad_token_id=0)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, number):
        if number == {fails_at}:
            raise ValueError("of the data")
        if number == 5:
            return None
        length = 9 if number == 6 else 7
        ids = torch.full((length,), number)
        images = ["image"] * (2 if number == 7 else 1)
        return dict(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids), images=images)

def ids_of(pack):
    # No tensor: workers send tensors over a socket, whose path would be too long here.
    assert pack["labels"].eq(-100).equal(pack["attention_mask"].eq(0))
    assert len(pack["images"]) == pack["attention_mask"].eq(0).sum()
    return pack["input_ids"].tolist()

packs = ConstantLengthDataset(Questions(), {infinite})
options = dict(batch_size=None, num_workers={workers}, collate_fn=ids_of)
for number, ids in enumerate(torch.utils.data.DataLoader(packs, **options)):
    print(*ids)
    if number == 20:
        break
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


@pytest.mark.parametrize(
    ("name", "module", "copy"),
    [
        ("east", "data_util", COPY),
        ("ctpn", "utils.dataset.data_util", "GeneratorEnqueuer = None"),
    ],
)
def test_a_program_reads_without_its_copy_and_gets_the_error_of_the_data(
    name, module, copy, tmp_path
):
    program = POLLING.format(module=module, fails_at=6)
    write(tmp_path, program=program, **{module.replace(".", "__"): copy})
    code, out, err = run_changed(tmp_path, name)
    assert (code, out) == (1, "[0, 1, 2, 3, 4, 5]\n")
    assert "ValueError: of the data" in err


def packed(*pairs):
    """Return the tokens of packs of these questions, of seven tokens and an end each."""
    return [" ".join(f"{number} " * 7 + "0" for number in pair) for pair in pairs]


def run_nanovlm(folder, fails_at=None, workers=0, infinite=False):
    needs_installed("torch")
    program = QUESTIONS.format(fails_at=fails_at, workers=workers, infinite=infinite)
    write(folder, data__advanced_datasets=PACKS, program=program)
    code, out, err = run_changed(folder, "nanovlm")
    return code, out.splitlines(), err


def test_nanovlm_packs_the_questions_in_their_order(tmp_path):
    code, packs, err = run_nanovlm(tmp_path)
    assert code == 0, err
    # A buffer is full with the fifth question, so the third pack has one question only.
    first = packed((0, 1), (2, 3), (4,))
    assert packs == first + packed((8, 9), (10, 11), (12,), (13, 14), (15, 16), (17,), (18, 19))


def test_nanovlm_packs_a_share_of_the_questions_in_each_worker(tmp_path):
    code, packs, err = run_nanovlm(tmp_path, workers=2)
    assert code == 0, err
    even = packed((0, 2), (4, 8), (10,), (12, 14), (16, 18))
    odd = packed((1, 3), (9, 11), (13,), (15, 17), (19,))
    assert packs == [pack for both in zip(even, odd, strict=True) for pack in both]


def test_nanovlm_packs_epoch_after_epoch_without_an_end(tmp_path):
    code, packs, err = run_nanovlm(tmp_path, infinite=True)
    assert code == 0, err
    assert len(packs) == 21
    assert packs[9:11] == packed((18, 19), (0, 1))


@pytest.mark.parametrize("workers", [0, 1])
def test_nanovlm_gets_the_error_of_the_data_after_the_packs_before_it(workers, tmp_path):
    code, packs, err = run_nanovlm(tmp_path, fails_at=10, workers=workers)
    assert code == 1
    assert packs == packed((0, 1), (2, 3), (4,))
    assert "in __getitem__" in err
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


@pytest.mark.timeout(300)
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
        timeout=2 * LIMIT,
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
    # torch's own loader hangs in a few of a hundred runs: the exception of its handler of SIGCHLD
    # leaves a queue locked, and the exit of the program waits for that lock.
    assert re.search("RuntimeError: DataLoader worker|hangs: no end after 90 s", killed[0])
    assert "enqueuer.adapters.torch" in killed[1]
    assert "SIGKILL" in killed[1]
    assert killed[2].startswith("after, max_restarts=1: 16 steps")
    for line in killed:
        assert "results equal so far: True" in line
    # torch's own loader leaves a folder; that of enqueuer leaves nothing.
    for line in killed[1:]:
        assert line.endswith("; left: 0 processes, 0 temporary files")
