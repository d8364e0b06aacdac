"""MIC-DKFZ/nnUNet, nnUNetTrainer.py: its augmenter is an enqueuer, with repeatable seeds."""

from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as trainer

from enqueuer import GeneratorEnqueuer
from enqueuer.adapters.torch import TorchLoader


class Augmenter:
    def __init__(self, data_loader, transform, num_processes, num_cached, pin_memory, **_):
        def batches(shard):
            data_loader.set_thread_id(shard.index)
            yield from data_loader

        enqueuer = GeneratorEnqueuer(
            batches,
            workers=num_processes,
            backend="process",
            max_queue_size=num_cached,
            random_seed=7,
        )
        self.loader = TorchLoader(enqueuer, pin_memory=pin_memory)
        self.batches = iter(self.loader)

    def __next__(self):
        return next(self.batches)

    def _finish(self):
        self.loader.stop()


trainer.NonDetMultiThreadedAugmenter = Augmenter
