"""milesial/Pytorch-UNet, train.py: every DataLoader is one of enqueuer."""

import torch.utils.data

from enqueuer.adapters.torch import DataLoader

torch.utils.data.DataLoader = DataLoader
