"""The traceback of a worker names the file of the script, the line and its text: in the error that
the loop gets, in the log of a skipped item and in the report of a stall."""

import logging
import traceback

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes


def decode(path):
    return {"cat": 1}[path]  # here


def batches(shard):
    yield from (decode(path) for path in shard.split(["cat", "dog"]))


def is_named(text):
    return __file__ in text and 'return {"cat": 1}[path]  # here' in text


texts = []


class Handler(logging.Handler):
    def emit(self, record):
        texts.append(logging.Formatter().format(record))


logging.getLogger("enqueuer").addHandler(Handler())
problems = []
for method in ("fork", "forkserver", "spawn"):
    backend = Processes(start_method=method)
    try:
        with GeneratorEnqueuer(batches, workers=1, backend=backend) as e:
            list(e)
    except KeyError as error:
        if not is_named("".join(traceback.format_exception(error))):
            problems.append(f"{method}: the error")
    texts.clear()
    with OrderedEnqueuer(
        ["dog"], lambda path: decode(path), workers=1, backend=backend, on_error="skip"
    ) as e:
        list(e)
    if not any(map(is_named, texts)):
        problems.append(f"{method}: the log")
print("FAIL: " + "; ".join(problems) if problems else "ok")
