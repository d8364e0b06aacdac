import torch
from torch.utils.data import TensorDataset

from enqueuer.adapters.torch import DataLoader


def make(workers):
    dataset = TensorDataset(torch.arange(40))
    return DataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers)


loader, given = make(2), []
for (rows,) in loader:
    given += rows.tolist()
    if len(given) == 24:
        state = loader.state_dict()  # a small dict, for the checkpoint
        break

loader = make(1)
loader.load_state_dict(state)
given += [row for (rows,) in loader for row in rows.tolist()]
print(sorted(given) == list(range(40)))
