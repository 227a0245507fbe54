"""Where the text of a labelled point goes, so that nothing lies on anything.

Every label tries positions on rings around its point. A position costs: overlap with other labels and with markers
(heavy), leaving the frame (heavy), crossing lines (light), distance from its point (lightest). Labels are placed one
after the other, then each moves to its best place given all others until nothing moves. Deterministic; about 10 ms
for 20 labels. All numbers are pixels, y upwards; a box is (x0, y0, x1, y1).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

RINGS = (0.5, 0.9, 1.5, 2.3, 3.3, 4.6, 6.2, 8.0)  # gap between marker and text, in label heights
ALONG = (0.0, 0.5, -0.5, 1.0, -1.0, 0.25, -0.25, 0.75, -0.75)  # shift of the text along the side it stands on


def candidates(anchor, size, marker: float) -> tuple[np.ndarray, np.ndarray]:
    """Boxes float [n, 4] around one point and the cost [n] of each: near before far, right before above before left."""
    w, h = size
    boxes, cost = [], []
    for ring, gap in enumerate(RINGS):
        right, up = marker + gap * h * 0.8 + w / 2, marker + gap * h * 0.6 + h / 2
        sides = [(right, 0.0, 0.0), (-right, 0.0, 0.10)]
        sides += [(s * right, t * up, 0.12 + 0.05 * (s < 0)) for t in (0.5, -0.5) for s in (1, -1)]
        sides += [(s * (right - marker), t * up, 0.08 + 0.05 * (s < 0)) for t in (1, -1) for s in (1, -1)]
        sides += [(a * w / 2, t * up, 0.05 + 0.1 * abs(a) + 0.02 * (t < 0)) for t in (1, -1) for a in ALONG]
        for dx, dy, extra in sides:
            cx, cy = anchor[0] + dx, anchor[1] + dy
            boxes.append((cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2))
            cost.append(0.45 * ring + extra)
    return np.array(boxes), np.array(cost)


def overlap(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Common area of boxes [n, 4] with others [m, 4] -> [n, m]."""
    w = np.minimum(boxes[:, None, 2], others[None, :, 2]) - np.maximum(boxes[:, None, 0], others[None, :, 0])
    h = np.minimum(boxes[:, None, 3], others[None, :, 3]) - np.maximum(boxes[:, None, 1], others[None, :, 1])
    return np.clip(w, 0, None) * np.clip(h, 0, None)


def _outside(boxes: np.ndarray, frame) -> np.ndarray:
    x0, y0, x1, y1 = frame
    over = np.stack([x0 - boxes[:, 0], y0 - boxes[:, 1], boxes[:, 2] - x1, boxes[:, 3] - y1])
    return np.clip(over, 0, None).sum(0)


def _samples(segments, step: float = 4.0) -> np.ndarray:
    """Points along polylines, so that a box crossed by a line contains some of them. -> [m, 2]."""
    parts = []
    for line in segments:
        for a, b in pairwise(line):
            n = max(2, int(np.hypot(*(np.subtract(b, a))) / step))
            parts.append(np.linspace(a, b, n))
    return np.concatenate(parts) if parts else np.zeros((0, 2))


def _inside(boxes: np.ndarray, points: np.ndarray) -> np.ndarray:
    x, y = points[None, :, 0], points[None, :, 1]
    inside = (x > boxes[:, None, 0]) & (x < boxes[:, None, 2]) & (y > boxes[:, None, 1]) & (y < boxes[:, None, 3])
    return inside.sum(1)


def place(anchors, sizes, frame, marker: float = 6.0, lines=(), pad: float = 2.0) -> np.ndarray:
    """Boxes float [n, 4] for labels of `sizes` [n, 2] at `anchors` [n, 2] inside `frame` (x0, y0, x1, y1).

    `marker`: radius kept free around every anchor; `lines`: polylines that text should rather not cross; `pad`: gap
    between two labels.
    """
    anchors, sizes = np.asarray(anchors, float).reshape(-1, 2), np.asarray(sizes, float).reshape(-1, 2)
    n = len(anchors)
    grow = np.array([-pad, -pad, pad, pad])
    marks = np.concatenate([anchors - marker, anchors + marker], axis=1)
    along = _samples(lines)
    options, base = [], []
    for i in range(n):
        boxes, far = candidates(anchors[i], sizes[i], marker)
        hidden = overlap(boxes + grow / 2, marks).sum(1) / (4 * marker * marker)
        options.append(boxes)
        base.append(far + 8 * hidden + 0.6 * _outside(boxes, frame) + 0.1 * _inside(boxes, along))
    placed = np.full((n, 4), np.nan)
    for _ in range(12):
        moved = False
        for i in sorted(range(n), key=lambda i: (-anchors[i][0], anchors[i][1])):
            others = np.delete(placed, i, axis=0)
            others = others[~np.isnan(others[:, 0])]
            clash = overlap(options[i] + grow, others).sum(1) / (sizes[i][1] ** 2) if len(others) else 0
            best = options[i][np.argmin(base[i] + 6 * clash + 4 * (clash > 0))]
            moved |= not np.array_equal(best, placed[i])
            placed[i] = best
        if not moved:
            break
    return placed
