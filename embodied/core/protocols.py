"""Base classes of environments, policies and algorithms, under the name of the module that they had before."""

from embodied.core.algorithm import Algorithm as Algorithm
from embodied.core.algorithm import Metrics as Metrics
from embodied.core.env import VecEnv as VecEnv
from embodied.core.policy import Policy as Policy
