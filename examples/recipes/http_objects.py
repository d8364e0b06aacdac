"""Objects of an HTTP server: each shard has a connection of its own, and all wait at once."""

import asyncio
import sys
import threading
import time

import numpy as np

try:
    import aiohttp
    from aiohttp import web
except ImportError as error:
    print(f"{error}. This needs aiohttp: pip install aiohttp", file=sys.stderr)
    sys.exit(2)

from enqueuer import GeneratorEnqueuer

URLS = []


# [recipe]
async def batches(shard):
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        for url in shard.split(URLS):
            async with session.get(url) as response:
                yield np.frombuffer(await response.read(), np.float32)


# [end]


async def answer(request):
    """Stand for a network, and send an array of the number in the path."""
    await asyncio.sleep(0.03)
    number = int(request.match_info["number"])
    return web.Response(body=np.full(1000, number, np.float32).tobytes())


async def serve(started):
    app = web.Application()
    app.add_routes([web.get("/{number}", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    URLS.extend(f"http://127.0.0.1:{runner.addresses[0][1]}/{number}" for number in range(128))
    started.set()
    await asyncio.Event().wait()


started = threading.Event()
threading.Thread(target=asyncio.run, args=(serve(started),), daemon=True).start()
started.wait()

for shards in (1, 16):
    began = time.perf_counter()
    with GeneratorEnqueuer(batches, shards=shards) as enqueuer:
        seen = [int(batch[0]) for batch in enqueuer]
    print(f"{len(seen) / (time.perf_counter() - began):.0f} objects a second, shards={shards}")
    assert seen == list(range(128))
