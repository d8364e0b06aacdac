"""Native threads after a fork of a process whose libraries have run some."""

from helpers import needs_installed, run_program

USED = """
    import threading

    import cv2
    import numpy as np
    import torch

    from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes

    torch.set_num_threads(2), cv2.setNumThreads(2)

    def work(*_):
        signal = torch.nn.functional.conv1d(torch.ones(8, 16, 20_000), torch.ones(16, 16, 9))
        image = cv2.GaussianBlur(np.ones((1000, 1000, 3), np.uint8), (9, 9), 0)
        product = np.ones((500, 500)) @ np.ones((500, 500))
        limits = torch.get_num_threads(), cv2.getNumThreads()
        return (*limits, float(signal.max()), int(image.max()), float(product.max()))

    def work_in_a_thread(*_):
        found = []
        thread = threading.Thread(target=lambda: found.append(work()))
        thread.start()
        thread.join()
        return found[0]

    *here, signal, image, product = work()
    assert here == [2, 2], here
    for number in (1, 2):
        options = dict(
            backend=Processes(start_method="fork", threads=2), workers=number, timeout=30
        )
        for function in (work, work_in_a_thread):
            with OrderedEnqueuer(range(2), function, **options) as batches:
                assert list(batches) == [(1, 1, signal, image, product)] * 2
        live = (work() for _ in range(2))
        with GeneratorEnqueuer(live, True, random_seed=0, timeout=30) as batches:
            assert list(batches) == [(1, 1, signal, image, product)] * 2
    assert work() == (2, 2, signal, image, product)
"""


def test_what_ran_threads_before_a_fork_runs_after_it(tmp_path):
    needs_installed("torch", "cv2")
    code, _, errors = run_program(tmp_path, USED)
    assert code == 0, errors
