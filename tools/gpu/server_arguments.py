EAGER = {"cuda": {}, "cpu": {}}
GRAPHS = {"cuda": {}, "cpu": {}}
DETERMINISTIC = {"cuda": {}, "cpu": {}}
