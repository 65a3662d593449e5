"""The graphs of GraphCast (Lam et al. 2023, supplement 3.3): a refined icosahedron and a latitude-longitude grid.

What deepmind/graphcast's ``icosahedral_mesh.py`` and ``grid_mesh_connectivity.py`` make, with numpy and scipy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def mesh_nodes(level: int) -> int:
    """Nodes of an icosahedron after ``level`` refinements: ``10 * 4^level + 2``."""
    return 10 * 4**level + 2


def mesh_edges(level: int) -> int:
    """Directed edges of all refinements up to ``level`` together: ``60 * (1 + 4 + ... + 4^level)``."""
    return 20 * (4 ** (level + 1) - 1)


@dataclass(frozen=True)
class Mesh:
    """``points`` [nodes, 3] on the sphere, ``faces`` [f, 3] of the finest level, directed ``edges`` [e, 2] of all."""

    points: Floats
    faces: Ints
    edges: Ints


def icosphere(level: int) -> Mesh:
    """An icosahedron whose faces are cut in four ``level`` times; the edges of every level stay (the multi-mesh)."""
    golden = (1 + 5**0.5) / 2
    corners = [(s, t * golden, 0.0) for s in (-1, 1) for t in (-1, 1)]
    points = np.array([np.roll(c, turn) for turn in range(3) for c in corners])
    points = points / np.linalg.norm(points, axis=1, keepdims=True) @ _upright(golden)
    near = np.linalg.norm(points[:, None] - points[None], axis=2) < 1.2
    faces = np.array(
        [
            (i, j, k)
            for i in range(12)
            for j in range(i + 1, 12)
            for k in range(j + 1, 12)
            if near[i, j] and near[j, k] and near[i, k]
        ]
    )
    edges = [_edges(faces)]
    for _ in range(level):
        points, faces = _refined(points, faces)
        edges.append(_edges(faces))
    both = np.concatenate(edges)
    return Mesh(points, faces, np.concatenate([both, both[:, ::-1]]))


def _upright(golden: float) -> Floats:
    """The reference's turn about y, which puts the middle of a face at each pole."""
    angle = np.pi / 2 - np.arcsin(golden / 3**0.5)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[cos, 0, sin], [0, 1, 0], [-sin, 0, cos]])


def _edges(faces: Ints) -> Ints:
    pairs = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [0, 2]]])
    return np.unique(np.sort(pairs, axis=1), axis=0)


def _refined(points: Floats, faces: Ints) -> tuple[Floats, Ints]:
    edges = _edges(faces)
    middles = points[edges].mean(1)
    middles /= np.linalg.norm(middles, axis=1, keepdims=True)
    key = edges[:, 0] * len(points) + edges[:, 1]

    def middle(a: int, b: int) -> Ints:
        ends = np.sort(faces[:, [a, b]], axis=1)
        return len(points) + np.searchsorted(key, ends[:, 0] * len(points) + ends[:, 1])

    ab, bc, ca = middle(0, 1), middle(1, 2), middle(0, 2)
    a, b, c = faces.T
    parts = [np.stack(p, 1) for p in ((a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca))]
    return np.concatenate([points, middles]), np.concatenate(parts)


def grid_points(latitudes: int, longitudes: int) -> Floats:
    """Points of a grid with both poles, [latitudes * longitudes, 3] on the unit sphere."""
    theta = np.linspace(0.0, np.pi, latitudes)
    phi = np.arange(longitudes) * (2 * np.pi / longitudes)
    t, p = (x.ravel() for x in np.meshgrid(theta, phi, indexing="ij"))
    return np.stack([np.sin(t) * np.cos(p), np.sin(t) * np.sin(p), np.cos(t)], 1)


def grid_to_mesh(grid: Floats, mesh: Mesh, share: float = 0.6) -> Ints:
    """Edges [e, 2] from grid points to all mesh nodes nearer than ``share`` of the longest edge of the finest mesh."""
    ends = mesh.points[_edges(mesh.faces)]
    radius = share * np.linalg.norm(ends[:, 0] - ends[:, 1], axis=1).max()
    found = KDTree(mesh.points).query_ball_point(grid, radius)
    counts = np.array([len(nodes) for nodes in found])
    senders = np.repeat(np.arange(len(grid)), counts)
    return np.stack([senders, np.concatenate([np.asarray(nodes, dtype=np.int64) for nodes in found])], 1)


def mesh_to_grid(grid: Floats, mesh: Mesh, candidates: int = 12) -> Ints:
    """Edges [3 * grid, 2] from the corners of the triangle that holds a grid point to that point.

    Of the ``candidates`` triangles with the nearest centres, the one in which the point lies deepest.
    """
    corners = mesh.points[mesh.faces]
    near = np.asarray(KDTree(corners.mean(1)).query(grid, k=min(candidates, len(corners)))[1])
    normals = np.cross(corners, np.roll(corners, -1, axis=1))
    normals *= np.sign(np.einsum("fej,fej->fe", normals, np.roll(corners, -2, axis=1)))[..., None]
    depth = np.einsum("gfej,gj->gfe", normals[near], grid).min(2)
    face = near[np.arange(len(grid)), depth.argmax(1)]
    return np.stack([mesh.faces[face].ravel(), np.repeat(np.arange(len(grid)), 3)], 1)
