"""The positions and the waits of all ranks, gathered by torch.distributed."""

import dataclasses
import itertools
import json

import pytest
from helpers import needs, run_program

needs("torch")

import torch  # noqa: E402

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, StateMismatch, merge_states  # noqa: E402
from enqueuer.adapters.cuda import CudaDataLoader  # noqa: E402
from enqueuer.adapters.torch import (  # noqa: E402
    DataLoader,
    EnqueuerIterableDataset,
    RankStats,
    TorchLoader,
    gather_state,
    gather_stats,
)

CHECKPOINT = """
    import json, sys, torch
    import torch.distributed as distributed
    import torch.distributed.checkpoint as checkpoints
    import torch.multiprocessing
    from enqueuer import GeneratorEnqueuer
    from enqueuer.adapters.torch import TorchLoader, gather_state

    def rows(shard):
        for number in range(2 + shard.index % 3):
            yield torch.tensor([shard.index, number, shard.rng.integers(1000)])

    def main(rank, world_size):
        path = sys.argv[0] + ".checkpoint"
        store = distributed.FileStore(f"{path}.{world_size}", world_size)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        weight = torch.zeros(2)
        got = []
        with TorchLoader(GeneratorEnqueuer(rows, shards=12, random_seed=7)) as loader:
            if world_size == 4:
                batches = iter(loader)
                got = [next(batches).tolist() for _ in range(2)]
                state = {"weight": weight + 5, "data": json.dumps(gather_state(loader))}
                checkpoints.save(state, checkpoint_id=path)
        if world_size != 4:
            state = {"weight": weight, "data": ""}
            checkpoints.load(state, checkpoint_id=path)
            loader.load_state_dict(json.loads(state["data"]))
            with loader:
                got = [batch.tolist() for batch in loader]
        everyone = [None] * world_size
        distributed.all_gather_object(everyone, got)
        if rank == 0:
            print(json.dumps([everyone, state["weight"].tolist()]))
        distributed.destroy_process_group()

    if __name__ == "__main__":
        for world_size in (4, 2, 3):
            torch.multiprocessing.start_processes(
                main, (world_size,), nprocs=world_size, start_method="fork"
            )
"""


def test_one_distributed_checkpoint_of_four_processes_resumes_on_two_and_on_three(tmp_path):
    code, out, err = run_program(tmp_path, CHECKPOINT)
    assert code == 0, err
    four, two, three = [json.loads(line) for line in out.splitlines() if line.startswith("[[")]
    assert [len(batches) for batches in four[0]] == [2, 2, 2, 2]
    first = list(itertools.chain(*four[0]))
    for everyone, weight in (two, three):
        assert weight == [5, 5]
        rest = list(itertools.chain(*everyone))
        places = sorted([shard, number] for shard, number, _ in first + rest)
        assert places == [[shard, n] for shard in range(12) for n in range(2 + shard % 3)]
    assert sorted(itertools.chain(*two[0])) == sorted(itertools.chain(*three[0]))


def tensors(shard):
    for number in range(5):
        yield torch.tensor(10 * shard.index + number)


def enqueuer_of(rank, world_size):
    own = dict(shards=12, random_seed=7, rank=rank, world_size=world_size)
    return GeneratorEnqueuer(tensors, **own)


LOADERS = {
    "TorchLoader": TorchLoader,
    "CudaDataLoader": lambda enqueuer: CudaDataLoader(enqueuer, "cpu"),
    "CudaDataLoader of TorchLoader": lambda enqueuer: CudaDataLoader(TorchLoader(enqueuer), "cpu"),
    "EnqueuerIterableDataset": EnqueuerIterableDataset,
}


@pytest.mark.parametrize("name", LOADERS)
def test_each_torch_loader_goes_on_from_a_merged_state(name):
    states, got = [], []
    for rank in range(4):
        loader = LOADERS[name](enqueuer_of(rank, 4))
        batches = iter(loader)
        got += [int(next(batches)) for _ in range(3)]
        states.append(loader.state_dict())
        del batches
        loader.stop()
    merged = json.loads(json.dumps(merge_states(states)))
    for rank in range(3):
        loader = LOADERS[name](enqueuer_of(rank, 3))
        loader.load_state_dict(merged)
        got += [int(batch) for batch in loader]
        loader.stop()
    assert sorted(got) == [10 * shard + number for shard in range(12) for number in range(5)]


def test_the_step_of_an_epoch_of_so_many_steps_is_that_of_all_ranks():
    def state_of(rank, count):
        enqueuer = OrderedEnqueuer(range(40), rank=rank, world_size=2, random_seed=7)
        with TorchLoader(enqueuer, steps_per_epoch=5) as loader:
            batches = iter(loader)
            got = [int(next(batches)) for _ in range(count)]
            return got, loader.state_dict()

    (first, one), (second, other) = state_of(0, 3), state_of(1, 3)
    merged = merge_states([one, other])
    assert merged["step"] == 3
    own = OrderedEnqueuer(range(40), random_seed=7)
    with TorchLoader(own, steps_per_epoch=5) as loader:
        loader.stop()
        loader.load_state_dict(merged)
        assert [len(list(loader)) for _ in range(2)] == [2, 5]
    with pytest.raises(StateMismatch, match=r"step of steps_per_epoch is 3 in one .* 2 in another"):
        merge_states([one, state_of(1, 2)[1]])
    assert sorted(first + second) == list(range(6))


def test_without_torch_distributed_this_rank_has_the_only_state():
    with TorchLoader(OrderedEnqueuer(range(9), random_seed=7)) as loader:
        assert int(next(iter(loader))) == 0
        state = gather_state(loader)
        assert state == merge_states([loader.state_dict()])
    one = OrderedEnqueuer(range(9), rank=0, world_size=2, random_seed=7)
    with pytest.raises(StateMismatch, match=r"each of 2 ranks once, .* none of the ranks \[1\]"):
        gather_state(one)


def test_the_sampler_of_a_data_loader_decides_for_as_many_ranks():
    loader = DataLoader(range(8), batch_size=2)
    with pytest.raises(StateMismatch, match=r"sampler decides .*TorchLoader\(OrderedEnqueuer"):
        merge_states([loader.state_dict()])


# --- the rank that the others wait for -----------------------------------------------------------


@pytest.fixture(scope="module")
def stats():
    with OrderedEnqueuer(range(20)) as enqueuer:
        list(enqueuer)
        return enqueuer.stats()


def waited(stats, seconds):
    """Return statistics of a loop that waited so many seconds of a hundred."""
    workers = [
        dataclasses.replace(worker, making_s=90.0, waiting_s=10.0, cpu_s=9.0, cpu_wait_s=0.0)
        for worker in stats.workers
    ]
    return dataclasses.replace(
        stats,
        seconds=100.5,
        waiting_s=seconds,
        working_s=100 - seconds,
        first_batch_s=0.5,
        loop_cpu_s=1.0,
        cpus=8,
        workers=tuple(workers),
    )


def test_the_rank_that_waits_most_is_named_with_its_bottleneck(stats):
    ranks = RankStats({rank: waited(stats, s) for rank, s in enumerate([2.0, 0.5, 1.0, 41.0])})
    assert ranks.slowest == 3
    assert ranks.bottleneck() == ranks.stats[3].bottleneck()
    assert ranks.bottleneck().kind == "source"
    *table, sentence = str(ranks).splitlines()
    assert [line.split()[0] for line in table] == ["rank", "0", "1", "2", "3"]
    assert table[4].split()[:5] == ["3", "20", "41", "s", "41"]
    assert [line.split()[-1] for line in table[1:]] == ["loop", "loop", "loop", "source"]
    assert sentence.startswith(
        "Rank 3 waited 41 % of its time, the others at most 2.0 %. The bottleneck is the source: "
    )


def test_without_torch_distributed_this_rank_has_the_only_statistics(stats):
    ranks = gather_stats(waited(stats, 41.0))
    assert ranks.stats == {0: waited(stats, 41.0)}
    assert str(ranks).splitlines()[-1].startswith("Rank 0 waited 41 % of its time. The bottleneck")


def test_before_the_first_batch_there_is_a_table(stats):
    ranks = RankStats({0: OrderedEnqueuer(range(20)).stats(), 1: stats})
    assert str(ranks).splitlines()[1].split()[-2:] == ["-", "unknown"]


def test_what_are_no_statistics_is_refused():
    with pytest.raises(TypeError, match=r"takes the result of stats\(\), got <OrderedEnqueuer"):
        gather_stats(OrderedEnqueuer(range(20)))


def test_a_loader_has_the_statistics_of_the_enqueuer_of_its_rank():
    whole = OrderedEnqueuer(range(20), random_seed=7)
    loader = TorchLoader(whole, rank=1, world_size=4)
    with CudaDataLoader(loader, "cpu") as outer:
        assert len(list(outer)) == 5
        assert outer.stats().items == loader.stats().items == 5
    assert whole.stats().items == 0


def test_the_enqueuer_of_a_rank_keeps_the_callbacks_of_on_stats():
    seen = []
    whole = OrderedEnqueuer(range(40), random_seed=7)
    whole.on_stats(seen.append, every=0)
    with TorchLoader(whole, rank=1, world_size=4) as loader:
        list(loader)
    assert 0 < sum(stats.items for stats in seen) <= 10


FOUR_RANKS = """
    import dataclasses, sys
    import torch.distributed as distributed
    import torch.multiprocessing
    from enqueuer import OrderedEnqueuer
    from enqueuer.adapters.torch import TorchLoader, gather_stats

    def main(rank, path):
        store = distributed.FileStore(path, 4)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=4)
        odd = distributed.new_group([1, 3])
        with TorchLoader(OrderedEnqueuer(range(40), random_seed=7)) as loader:
            list(loader)
        waiting_s = [1.0, 2.0, 41.0, 0.5][rank]
        stats = dataclasses.replace(
            loader.stats(), waiting_s=waiting_s, working_s=100 - waiting_s
        )
        ranks = gather_stats(stats)
        found = [ranks.slowest, ranks.stats[rank] == stats]
        try:
            part = gather_stats(stats, odd)
            found += [part.slowest, list(part.stats)]
        except ValueError as error:
            found.append(str(error))
        everyone = [None] * 4
        distributed.all_gather_object(everyone, found)
        if rank == 0:
            print(*everyone, ranks, sep="\\n")
        distributed.destroy_process_group()

    if __name__ == "__main__":
        torch.multiprocessing.start_processes(
            main, (sys.argv[0] + ".store",), nprocs=4, start_method="fork"
        )
"""


def test_four_processes_find_the_rank_that_waits_most(tmp_path):
    code, out, err = run_program(tmp_path, FOUR_RANKS)
    lines = out.splitlines()
    outside = "this rank is not in the group; call gather_stats() on its ranks only"
    assert lines[:4] == [
        f"[2, True, '{outside}']",
        "[2, True, 1, [1, 3]]",
        f"[2, True, '{outside}']",
        "[2, True, 1, [1, 3]]",
    ], err
    assert [line.split()[:2] for line in lines[5:9]] == [[str(rank), "10"] for rank in range(4)]
    assert lines[9].startswith("Rank 2 waited 41 % of its time, the others at most 2.0 %. ")
    assert code == 0
