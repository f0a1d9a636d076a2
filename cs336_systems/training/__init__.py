"""Training a byte-level language model for real: corpus, schedule, wrappers by name, the loop, checkpoints."""

from cs336_systems.training.config import TrainingConfig
from cs336_systems.training.corpus import Corpus
from cs336_systems.training.loop import TrainingResult, train
from cs336_systems.training.schedule import learning_rate

__all__ = ["Corpus", "TrainingConfig", "TrainingResult", "learning_rate", "train"]
