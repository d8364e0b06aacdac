"""karpathy/nanochat, scripts/base_train.py: a process tokenizes and packs while the model trains.

The state that is saved with the model gets the position of the enqueuer as well, so that a resumed
run continues with the very next batch.
"""

import nanochat.dataloader

from enqueuer import GeneratorEnqueuer

NAME = "tokenizing_distributed_data_loader_with_state_bos_bestfit"
load = getattr(nanochat.dataloader, NAME)


def load_ahead(*arguments, device="cuda", resume_state_dict=None, **options):
    def batches():
        return load(*arguments, device="cpu", **options)

    enqueuer = GeneratorEnqueuer(batches, backend="process")
    if resume_state_dict:
        enqueuer.load_state_dict(resume_state_dict["enqueuer"])
    with enqueuer:
        position = enqueuer.state_dict()
        for inputs, targets, state in enqueuer:
            # The program saves the state of a batch that it has taken, but not yet trained on.
            yield inputs.to(device), targets.to(device), state | {"enqueuer": position}
            position = enqueuer.state_dict()


setattr(nanochat.dataloader, NAME, load_ahead)
