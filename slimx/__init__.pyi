from slimx.config.load import load_config as load_config
from slimx.config.schema import Config as Config
from slimx.data.records import Group as Group
from slimx.data.records import Prompt as Prompt
from slimx.data.records import Trajectory as Trajectory
from slimx.errors import SlimxError as SlimxError
from slimx.extras.scripting.evaluating import evaluate as evaluate
from slimx.extras.scripting.grpo import grpo as grpo
from slimx.extras.scripting.tables import metrics as metrics
from slimx.extras.scripting.tables import rollouts as rollouts
from slimx.extras.scripting.training import train as train
from slimx.extras.scripting.views import doctor as doctor
from slimx.extras.scripting.views import plan as plan
from slimx.rollout.hooks import GivenUp as GivenUp
from slimx.rollout.hooks import RewardContext as RewardContext
from slimx.rollout.hooks import RolloutContext as RolloutContext

__version__: str
