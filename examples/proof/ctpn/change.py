"""ReDeiPirati/text-detection-ctpn, data_provider.py: GeneratorEnqueuer is not its own copy."""

from utils.dataset import data_util

from enqueuer import GeneratorEnqueuer

data_util.GeneratorEnqueuer = GeneratorEnqueuer
