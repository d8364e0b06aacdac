"""joblib#522 (2017), #1221 (2021), pypeln#24 (2020): an element hangs forever; leave it out, or put
a placeholder, and go on with the others, without a change of the function."""

import logging
import time

from enqueuer import OrderedEnqueuer

logging.disable()


def load(i):
    time.sleep(1000 if i == 3 else 0.01)
    return i


def placeholder(error):
    return type(error).__name__


problems = []
for on_error, wanted in (("skip", []), (placeholder, ["ElementTimeout"])):
    enqueuer = OrderedEnqueuer(
        range(8),
        load,
        workers=2,
        backend="process",
        on_error=on_error,
        max_errors=5,
        element_timeout=1.5,
    )
    with enqueuer:
        got = list(enqueuer)
    if got != [0, 1, 2, *wanted, 4, 5, 6, 7]:
        problems.append(f"on_error={on_error}: {got}")
    if enqueuer.error_count != 1 or enqueuer.restart_count:
        problems.append(f"{enqueuer.error_count} errors, {enqueuer.restart_count} restarts")
try:
    OrderedEnqueuer(range(8), load, element_timeout=1.5)
except ValueError as error:
    if "a thread that hangs cannot be killed" not in str(error):
        problems.append(f"the reason is not said: {error}")
else:
    problems.append("threads accept the limit")
print("FAIL: " + "; ".join(problems) if problems else "ok")
