import torch
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.rand(3, 32, 32), index % 10


torch.manual_seed(7)
loader = DataLoader(Images(), batch_size=32, shuffle=True, num_workers=2)
for _ in range(2):
    for images, labels in loader:
        print(tuple(images.shape), labels.tolist())
