"""Load files over a network: each worker waits for many of them at once, by one argument.

A server on this machine, which takes 30 ms for each answer, stands for the network. The batches
are the same with and without `concurrency`, and in the same order.
"""

import http.server
import threading
import time
import urllib.request

import numpy as np

from enqueuer import OrderedEnqueuer

SIDE = 16


class Server(http.server.BaseHTTPRequestHandler):
    """Answers /7 with an image of which every value is 7."""

    def do_GET(self):
        time.sleep(0.03)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(bytes([int(self.path[1:])]) * SIDE**2)

    def log_message(self, *_):
        pass


def load(url, task):
    with urllib.request.urlopen(url) as answer:
        image = np.frombuffer(answer.read(), np.uint8).reshape(SIDE, SIDE)
    # Of the task, not of np.random: the threads of a worker share that one.
    return image + task.rng.random()


def batches(urls, **options):
    began = time.perf_counter()
    with OrderedEnqueuer(urls, load, True, batch_size=16, random_seed=7, **options) as enqueuer:
        found = list(enqueuer)
    print(f"{len(urls) / (time.perf_counter() - began):.0f} files a second with {options}")
    return found


server = http.server.ThreadingHTTPServer(("localhost", 0), Server)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
urls = [f"http://localhost:{server.server_port}/{i}" for i in range(64)]

alone = batches(urls, backend="process", workers=2)
at_once = batches(urls, backend="process", workers=2, concurrency=16)
server.shutdown()
server.server_close()

assert len(alone) == 4
for one, other in zip(alone, at_once, strict=True):
    assert np.array_equal(one, other)
