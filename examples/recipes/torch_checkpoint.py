"""Save the model, the optimizer, the random numbers and the position of the data; then resume."""

import io
import sys

try:
    import torch
except ImportError as error:
    print(f"{error}. This needs torch: pip install torch", file=sys.stderr)
    sys.exit(2)

from torch.utils.data import TensorDataset

from enqueuer.adapters.torch import DataLoader


def train(epochs, checkpoint=None, stop_at=None):
    """Train; return the weights, or a checkpoint after step `stop_at`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dataset = TensorDataset(torch.randn(24, 4))
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
    first = step = 0
    if checkpoint is not None:
        state = torch.load(io.BytesIO(checkpoint), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["torch"])
        first, step = state["epoch"], state["step"]
    for epoch in range(first, epochs):
        for (rows,) in loader:
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
            step += 1
            if step == stop_at:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                    "torch": torch.get_rng_state(),
                    "epoch": epoch,
                    "step": step,
                }
                file = io.BytesIO()
                torch.save(state, file)
                return file.getvalue()
    return model[0].weight


if __name__ == "__main__":
    whole = train(epochs=3)
    resumed = train(epochs=3, checkpoint=train(epochs=3, stop_at=8))
    assert torch.equal(whole, resumed)
    print("resumed: the same weights as without the stop")
