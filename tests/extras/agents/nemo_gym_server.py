"""One of NeMo Gym's own resources servers, in the environment that has the package: python nemo_gym_server.py PORT"""

from __future__ import annotations

import sys

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig
from resources_servers.example_session_state_mgmt.app import (
    StatefulCounterResourcesServer,
    StatefulCounterResourcesServerConfig,
)

here = {"host": "127.0.0.1", "port": int(sys.argv[1])}
config = StatefulCounterResourcesServerConfig(**here, entrypoint="app.py", name="counter")
client = ServerClient(head_server_config=BaseServerConfig(**here), global_config_dict=DictConfig({}))
uvicorn.run(StatefulCounterResourcesServer(config=config, server_client=client).setup_webserver(), **here)
