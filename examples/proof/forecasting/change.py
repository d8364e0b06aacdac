"""sktime/pytorch-forecasting, TimeSeriesDataSet.to_dataloader(): its DataLoader is another."""

from pytorch_forecasting.data.timeseries import _timeseries

from enqueuer.adapters.torch import DataLoader

_timeseries.DataLoader = DataLoader
