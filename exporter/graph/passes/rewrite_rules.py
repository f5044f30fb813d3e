"""onnxscript's rewrite rules, without a search of the whole graph for each node that a rule is not for.

A rule with several last nodes collects the nodes of the graph before it looks at the one that it is given. All nodes
are given to it, so the time grows with the square of their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter._basics import MatchResult
from onnxscript.rewriter._matcher import SimplePatternMatcher


def only_their_operator(match: Callable[..., MatchResult]) -> Callable[..., MatchResult]:
    """Return SimplePatternMatcher.match, which fails at once if a node is not the operator that a pattern ends with."""

    def wrapped(self: Any, model: ir.Model, graph: Any, node: ir.Node, **others: Any) -> MatchResult:
        operator = self.pattern.output_nodes[0].op_identifier()
        if operator is not None and operator[:2] != (node.domain, node.op_type):
            return MatchResult().fail("another operator")
        return match(self, model, graph, node, **others)

    return wrapped


#: for transformers.exporters.utils.patch_attributes
ONLY_THEIR_OPERATOR = SimplePatternMatcher, "match", only_their_operator
