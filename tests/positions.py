"""Sources and loaders of all shapes, and scripts that save and load their positions.

    python tests/positions.py        reads pickled calls (name, arguments) from its standard input,
                                     runs each in a forked process, and writes pickled results

Each call is a script of its own: it begins with the same seeds, as a user's program does.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import struct
import sys
import traceback
import warnings

import numpy as np

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes, StateMismatch, mix
from enqueuer.datasets.arrays import ArraySource

try:
    import torch
except ImportError:
    torch = None
else:
    from enqueuer.adapters.torch import DataLoader, TorchLoader

EPOCHS = 5
SAVED = 3  # epochs in which states are saved; two further ones are compared
SEED = 7
PROCESSES = Processes(start_method="fork")


class Bad(Exception):
    pass


def changing(shard):
    """Yield numbers that change in count with the epoch, and are random."""
    for number in range(2 + (shard.index * 5 + shard.epoch * 2) % 7):
        yield shard.index, shard.epoch, number, float(shard.rng.random())


def gaps(shard):
    for number in range(6):
        if number == 2:
            shard.report(Bad(f"{shard.index}, {number}"), log=False)
        yield None if number % 3 == 1 else (shard.index, number, int(shard.rng.integers(1000)))


def failing(shard):
    for item in changing(shard):
        if (item[0], item[1], item[2]) in ((1, 0, 1), (0, 1, 0), (2, 2, 3)):
            raise Bad(f"{item[:3]}")
        yield item


class Restarting:
    """An iterable whose `__iter__` begins anew unless a state was loaded: the natural way."""

    def __init__(self, first=0):
        self.first, self.at, self.epoch, self.is_loaded = first, 0, -1, False

    def __iter__(self):
        if not self.is_loaded:
            self.at, self.epoch = 0, self.epoch + 1
        self.is_loaded = False
        while self.at < 5 + self.epoch % 2:
            self.at += 1
            yield self.first + 100 * self.epoch + self.at

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch, self.is_loaded = state["at"], state["epoch"], True


class Reset(Restarting):
    """One that begins anew at the end of an iteration."""

    def __iter__(self):
        self.epoch = max(self.epoch, 0)
        while self.at < 5:
            self.at += 1
            yield self.first + 100 * self.epoch + self.at
        self.at, self.epoch = 0, self.epoch + 1


class Repeating:
    """An iterable without a state, the same in each epoch."""

    def __iter__(self):
        return iter(range(11))


class Counting:
    """An iterable whose iterators have a state."""

    def __iter__(self):
        return Counter()


class Counter:
    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 6:
            raise StopIteration
        self.at += 1
        return self.at

    def state_dict(self):
        return self.at

    def load_state_dict(self, state):
        self.at = state


def restarting(shard):
    return Restarting(1000 * shard.index)


def counting(shard):
    return Counting()


class Growing:
    """A sequence as Keras has it: its length and order change with the epoch."""

    def __init__(self):
        self.order = list(range(4))

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        return self.order[index]

    def on_epoch_end(self):
        self.order = np.random.permutation(len(self.order) % 6 + 2).tolist()


class Begun(Growing):
    """One that sets its length at the beginning of an epoch."""

    def __init__(self):
        self.order = []
        self.epoch = -1

    def on_epoch_begin(self):
        self.epoch += 1
        self.order = np.random.permutation(3 + self.epoch % 3).tolist()

    def on_epoch_end(self):
        pass


def drawn(element, task):
    return element, task.epoch, float(task.rng.random())


def skipped(element, task):
    if element % 4 == task.epoch % 4:
        raise Bad(f"{element}")
    return drawn(element, task)


def listed(results):
    return list(results)


SHARDS = {"shards": 3, "random_seed": SEED}


def shards(source, backend, workers, **options):
    return GeneratorEnqueuer(source, **SHARDS, **options, backend=backend, workers=workers)


def tasks(elements, map, backend, workers, **options):
    return OrderedEnqueuer(
        elements, map, random_seed=SEED, **options, backend=backend, workers=workers
    )


if torch is not None:

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 11

        def __getitem__(self, index):
            numbers = torch.rand(1).item(), float(np.random.random()), random.random()
            return torch.tensor([index, *numbers], dtype=torch.float64)

    class OwnGenerator(torch.utils.data.Sampler):
        """Goes on with its generator from epoch to epoch; some draw when they are iterated."""

        def __init__(self, kind):
            self.rng = {
                "torch": torch.Generator().manual_seed(3),
                "numpy": np.random.default_rng(3),
                "random": random.Random(3),
            }[kind]

        def __iter__(self):
            for _ in range(9):
                match self.rng:
                    case torch.Generator():
                        yield int(torch.randint(11, (), generator=self.rng))
                    case random.Random():
                        yield self.rng.randrange(11)
                    case _:
                        yield int(self.rng.integers(11))

        def __len__(self):
            return 9

    class ByNumpy(OwnGenerator):
        """Shuffles with numpy's global generator."""

        def __init__(self):
            pass

        def __iter__(self):
            return iter(np.random.permutation(9).tolist())

    class Changing(OwnGenerator):
        """Its length changes with its epoch, which a `set_epoch` sets."""

        def __init__(self):
            self.epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(np.random.default_rng(self.epoch).permutation(6 + self.epoch % 3).tolist())

    ORDERS = {
        "in order": lambda: {},
        "shuffled": lambda: {"shuffle": True},
        "generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
        "weighted": lambda: {"sampler": torch.utils.data.WeightedRandomSampler([1.0] * 11, 9)},
        "own torch": lambda: {"sampler": OwnGenerator("torch")},
        "own numpy": lambda: {"sampler": OwnGenerator("numpy")},
        "own random": lambda: {"sampler": OwnGenerator("random")},
        "by numpy": lambda: {"sampler": ByNumpy()},
        "changing": lambda: {"sampler": Changing()},
    }

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            part = (info.id, info.num_workers) if info else (0, 1)
            order = torch.randperm(12).tolist()[part[0] :: part[1]]
            for number in order:
                yield torch.tensor([number, random.random(), np.random.random()])

    def loader(order, backend, workers, **options):
        batches = DataLoader(Rows(), 2, num_workers=workers, **ORDERS[order](), **options)
        return batches

    def stream(backend, workers, **options):
        return DataLoader(Stream(), 2, num_workers=workers, **options)


# By name: the function that makes it from a backend and a number of workers, and which may vary.
KINDS = {
    "generator": (lambda *w, **o: shards(changing, *w, **o), "workers"),
    "generator with gaps": (lambda *w, **o: shards(gaps, *w, **o), "workers"),
    "generator that fails": (lambda *w, **o: shards(failing, *w, on_error="skip", **o), "workers"),
    "batches": (lambda *w, **o: shards(changing, *w, batch_size=3, collate=listed, **o), "workers"),
    "shuffled": (lambda *w, **o: shards(changing, *w, shuffle_buffer=4, **o), "workers"),
    "mixed": (
        lambda *w, **o: shards(mix({"a": changing, "b": gaps}, [2, 1]), *w, **o),
        "workers",
    ),
    "restarting shards": (lambda *w, **o: shards(restarting, *w, **o), "workers"),
    "counting shards": (lambda *w, **o: shards(counting, *w, **o), "workers"),
    "array": (
        lambda *w, **o: shards(ArraySource(np.arange(23), 4, shuffle=True), *w, **o),
        "workers",
    ),
    "list": (lambda *w, **o: tasks(range(13), drawn, *w, shuffle=True, **o), "workers"),
    "list in batches": (
        lambda *w, **o: tasks(
            range(13), drawn, *w, shuffle=True, batch_size=4, collate=listed, **o
        ),
        "workers",
    ),
    "list with errors": (lambda *w, **o: tasks(range(13), skipped, *w, on_error="skip"), "workers"),
    "growing": (lambda *w, **o: tasks(Growing(), drawn, *w, **o), "workers"),
    "begun": (lambda *w, **o: tasks(Begun(), drawn, *w, **o), "workers"),
    "iterable": (lambda *w, **o: tasks(Repeating(), drawn, *w, **o), "workers"),
    "iterable in batches": (
        lambda *w, **o: tasks(Repeating(), drawn, *w, batch_size=4, collate=listed, **o),
        "workers",
    ),
    "restarting": (lambda *w, **o: tasks(Restarting(), drawn, *w, **o), "workers"),
    "restarting in batches": (
        lambda *w, **o: tasks(Restarting(), drawn, *w, batch_size=2, collate=listed, **o),
        "workers",
    ),
    "reset": (lambda *w, **o: tasks(Reset(), drawn, *w, **o), "workers"),
    "counting": (lambda *w, **o: tasks(Counting(), drawn, *w, **o), "workers"),
}
if torch is not None:
    KINDS["torch loader"] = (
        lambda *w, **o: TorchLoader(tasks(range(13), drawn, *w, shuffle=True, **o)),
        "workers",
    )
    for _order in ORDERS:
        for _name, _options in (("", {}), (", persistent", {"persistent_workers": True})):
            KINDS[f"DataLoader, {_order}{_name}"] = (
                lambda *w, order=_order, options=_options, **o: loader(order, *w, **options),
                "processes",
            )
        KINDS[f"DataLoader, {_order}, no workers"] = (
            lambda *w, order=_order, **o: loader(order, w[0], 0),
            "none",
        )
    KINDS["DataLoader, stream"] = (lambda *w, **o: stream(*w), "fixed")
    KINDS["DataLoader, stream, persistent"] = (
        lambda *w, **o: stream(*w, persistent_workers=True),
        "fixed",
    )
    KINDS["DataLoader, stream, no workers"] = (lambda *w, **o: stream(w[0], 0), "none")

SETUPS = {
    "workers": [("thread", 1), ("thread", 3), (PROCESSES, 1), (PROCESSES, 2), ("thread", 0)],
    "processes": [(None, 1), (None, 2)],
    "fixed": [(None, 2)],
    "none": [(None, 0)],
}


def begin(kind, setup):
    """Begin a script: the seeds, then the enqueuer or loader."""
    random.seed(0)
    np.random.seed(0)
    if torch is not None:
        torch.manual_seed(0)
    return KINDS[kind][0](*setup)


def plain(batch):
    """Return a batch as lists and numbers, which can be compared."""
    if hasattr(batch, "tolist"):
        return batch.tolist()
    return [*map(plain, batch)] if isinstance(batch, (list, tuple)) else batch


def streams(kind):
    """Return the generators of the script, which a complete checkpoint has."""
    if not kind.startswith("DataLoader"):
        return None
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_epoch(loader, epoch):
    if hasattr(loader, "set_epoch") and torch is not None and isinstance(loader, DataLoader):
        loader.set_epoch(epoch)


def undisturbed(kind, setup):
    """Return the batches of all epochs, and a state for each step: epoch, batches before, state."""
    batches, epochs, states = begin(kind, setup), [], []

    def save(epoch, step):
        count = getattr(batches, "error_count", None)
        states.append((epoch, step, count, copy.deepcopy(batches.state_dict()), streams(kind)))

    with stopping(batches):
        for epoch in range(EPOCHS):
            set_epoch(batches, epoch)
            if epoch < SAVED:
                save(epoch, 0)
            epochs.append([])
            iterator = iter(batches)
            # Without workers, a sampler draws its seed from the global generator after that.
            if epoch < SAVED and KINDS[kind][1] != "none":
                save(epoch, 0)
            for batch in iterator:
                epochs[-1].append(plain(batch))
                if epoch < SAVED:
                    save(epoch, len(epochs[-1]))
        return epochs, states, getattr(batches, "error_count", None)


def resumed(kind, setup, saved, through_epochs):
    """Return the batches of an epoch from a state on, and of all further epochs."""
    epoch, _, count, state, generators = saved
    batches = begin(kind, setup)
    with stopping(batches):
        set_epoch(batches, epoch)
        try:
            batches.load_state_dict(state)
        except StateMismatch as error:
            return f"refused: {error}", None
        if generators is not None:
            torch.set_rng_state(generators[0])
            np.random.set_state(generators[1])
            random.setstate(generators[2])
        assert getattr(batches, "error_count", None) == count
        found = [[plain(batch) for batch in batches]]
        for following in range(epoch + 1, through_epochs):
            # At the end of an epoch, the rest of it may be empty, or the next one may begin.
            set_epoch(batches, following)
            found.append([plain(batch) for batch in batches])
        return found, getattr(batches, "error_count", None)


class stopping:
    """Stop what has workers at the end."""

    def __init__(self, batches):
        self.batches = batches

    def __enter__(self):
        warnings.simplefilter("ignore")

    def __exit__(self, *error):
        stop = getattr(self.batches, "stop", None)
        if stop is not None:
            stop()


def serve():
    """Run the calls that come, each in a process of its own."""
    if torch is not None:
        torch.set_num_threads(1)
    incoming, outgoing = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            name, arguments = pickle.load(incoming)
        except EOFError:
            return
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            try:
                result = globals()[name](*arguments)
            except BaseException:
                result = traceback.format_exc()
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(pickle.dumps(result))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            data = pipe.read()
        os.waitpid(pid, 0)
        outgoing.write(struct.pack("=Q", len(data)) + data)
        outgoing.flush()


if __name__ == "__main__":
    serve()
