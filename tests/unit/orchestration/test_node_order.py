"""Ranks fill the nodes in the order of NVLink domains, then of the job, then of addresses."""

from __future__ import annotations

from slimx.orchestration.ranks.group import DOMAIN, ORDER, in_order


def node(name: str, **labels: str) -> dict[str, object]:
    return {"NodeID": name, "NodeManagerAddress": f"10.0.0.{name[-1]}", "Labels": labels}


def test_nodes_of_one_domain_stay_together_in_the_order_of_the_job():
    found = [
        node("n1", **{DOMAIN: "rack-b", ORDER: "00001"}),
        node("n2", **{DOMAIN: "rack-a", ORDER: "00003"}),
        node("n3", **{DOMAIN: "rack-b", ORDER: "00000"}),
        node("n4", **{DOMAIN: "rack-a", ORDER: "00002"}),
    ]
    assert in_order(found) == ["n4", "n2", "n3", "n1"]


def test_without_labels_the_address_decides():
    assert in_order([node("n3"), node("n1") | {"Labels": None}, node("n2")]) == ["n1", "n2", "n3"]
