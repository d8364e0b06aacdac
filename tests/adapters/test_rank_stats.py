"""The waits of all ranks, gathered by torch.distributed: the rank that the others wait for."""

import dataclasses

import pytest
from helpers import needs, run_program

needs("torch")

from enqueuer import OrderedEnqueuer  # noqa: E402
from enqueuer.adapters.cuda import CudaDataLoader  # noqa: E402
from enqueuer.adapters.torch import RankStats, TorchLoader, gather_stats  # noqa: E402


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


def test_without_torch_distributed_this_rank_is_the_only_one(stats):
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
