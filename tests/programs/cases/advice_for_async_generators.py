"""An async generator with 16 shards was told `workers=16`, which changed nothing; more shards do."""

import asyncio

from enqueuer import GeneratorEnqueuer


async def units(shard):
    for unit in shard.split(range(400)):
        await asyncio.sleep(0.05)
        yield unit


def advice(**options):
    with GeneratorEnqueuer(units, **options) as enqueuer:
        list(enqueuer)
        return enqueuer.stats().bottleneck()


found = advice(shards=16)
if found.change.startswith("shards=") and "more shards help" in found.advice:
    print("ok")
else:
    print("FAIL:", found)
