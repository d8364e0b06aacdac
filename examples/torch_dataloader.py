"""Train with PyTorch's Dataset and one changed import; stop in mid-epoch, and resume exactly."""

import sys

try:
    import torch

    # The only change: it was `from torch.utils.data import DataLoader`.
    from enqueuer.adapters.torch import DataLoader
except ImportError as error:
    print(f"{error}. This needs PyTorch: pip install torch", file=sys.stderr)
    sys.exit(2)


class Points(torch.utils.data.Dataset):
    """Points with noise, and whether their sum is positive."""

    def __init__(self, count):
        self.points = torch.randn(count, 8)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        return point + 0.01 * torch.randn(8), (point.sum() > 0).float()


torch.manual_seed(7)
points = Points(1024)


def train(stop_at=None, saved=None):
    """Train for two epochs; return the weights, and a checkpoint if it stops before."""
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(2)
    loader = DataLoader(points, 64, shuffle=True, num_workers=2, generator=generator)
    first = 0
    if saved is not None:
        model.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])
        first = saved["epoch"]
    for epoch in range(first, 2):
        for step, (x, y) in enumerate(loader):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (epoch, step) == stop_at:
                checkpoint = {"model": model.state_dict(), "loader": loader.state_dict()}
                return model.weight.detach(), checkpoint | {"epoch": epoch}
    return model.weight.detach(), None


undisturbed, _ = train()
_, checkpoint = train(stop_at=(1, 5))
resumed, _ = train(saved=checkpoint)
assert torch.equal(undisturbed, resumed)
print("the resumed run ends with the weights of the undisturbed one")
