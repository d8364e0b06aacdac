"""Train a DeepAR of pytorch-forecasting on 20 random walks."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from pytorch_forecasting import DeepAR, TimeSeriesDataSet

SERIES, LENGTH = 20, 200

torch.manual_seed(7)
walks = np.random.default_rng(7).normal(size=(SERIES, LENGTH)).cumsum(axis=1)
table = pd.DataFrame(
    {
        "value": walks.ravel(),
        "series": np.repeat(np.arange(SERIES), LENGTH).astype(str),
        "step": np.tile(np.arange(LENGTH), SERIES),
    }
)
dataset = TimeSeriesDataSet(
    table,
    time_idx="step",
    target="value",
    group_ids=["series"],
    static_categoricals=["series"],
    time_varying_unknown_reals=["value"],
    max_encoder_length=30,
    max_prediction_length=10,
)
loader = dataset.to_dataloader(train=True, batch_size=64, num_workers=2)
model = DeepAR.from_dataset(dataset, hidden_size=8, rnn_layers=1)
trainer = pl.Trainer(
    max_epochs=4,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(model, loader)
