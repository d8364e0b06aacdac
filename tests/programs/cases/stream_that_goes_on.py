"""datasets#7612, torchtitan#1172: a stream that raises for a damaged sample and can go on behind it.

With on_error="skip" only the damaged samples are gone.
"""

from enqueuer import GeneratorEnqueuer

DAMAGED = (5, 6, 13)
WHOLE = [i for i in range(20) if i not in DAMAGED]


class Cursor:
    def __init__(self):
        self.i = -1

    def __iter__(self):
        return self

    def __next__(self):
        self.i += 1
        if self.i >= 20:
            raise StopIteration
        if self.i in DAMAGED:
            raise ValueError(f"sample {self.i} is damaged")
        return self.i


problems = []
for backend in ("thread", "process"):
    options = {"workers": 1, "backend": backend}
    with GeneratorEnqueuer(Cursor, on_error="skip", **options) as enqueuer:
        got = list(enqueuer)
        if got != WHOLE or enqueuer.error_count != 3:
            problems.append(f"{backend}: {got}, {enqueuer.error_count} errors")
    with GeneratorEnqueuer(Cursor, on_error=lambda error: -1, **options) as enqueuer:
        got = list(enqueuer)
        if got != [-1 if i in DAMAGED else i for i in range(20)]:
            problems.append(f"{backend}, with a replacement: {got}")
print("FAIL: " + "; ".join(problems) if problems else "ok")
