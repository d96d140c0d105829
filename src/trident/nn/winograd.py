"""3x3 convolution, padding 1, by Winograd's minimal filtering F(4x4, 3x3): a quarter of the multiplications.

A tile of 4x4 outputs depends on 6x6 inputs. Inputs and weights are transformed to 36 numbers each and multiplied
element by element: 36 products over channels instead of 144. The transforms (Lavin and Gray, 2016) are additions of
whole slices. Pixels come first and images after them, so that the slices are contiguous. Each core takes a share of the
images.

Everything here is linear in each argument. Autograd is handled in `convolution`.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from trident.nn.shares import in_shares

TILE = 4  # outputs of a tile in each direction
SPAN = TILE + 2  # inputs and products of a tile in each direction
ROWS, COLUMNS = -4, -3  # axes of the tiles
KERNEL = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)


def convolve(images: Tensor, weight: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(task, image, h, w, inputs) * (task, 3, 3, inputs, outputs) -> (task, image, h, w, outputs), pixels first.

    Also returns each core's share of the transformed images, for `pull_back`.
    """
    tasks, n, height, width, _ = images.shape
    kernels = transform_weight(weight).flatten(0, 2)  # (36 * task, inputs, outputs)
    result = images.new_empty(tasks, height, width, n, weight.shape[4])

    def convolve_share(share: slice) -> Tensor:
        transformed = transform_input(images[:, share])
        products = torch.bmm(_rows(transformed), kernels).view(*transformed.shape[:-1], -1)
        transform_back(products, result[:, :, :, share], _output_transform)
        return transformed

    parts = in_shares(convolve_share, n)
    return result.permute(0, 3, 1, 2, 4), parts


def pull_back(parts: list[Tensor], weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of images and weight, given the transformed images that `convolve` returned."""
    tasks, n, height, width, _ = gradient.shape
    kernels = transform_weight(weight).flatten(0, 2).transpose(1, 2)  # (36 * task, outputs, inputs)
    for_images = gradient.new_empty(tasks, height, width, n, weight.shape[3])
    stops = list(itertools.accumulate(transformed.shape[5] for transformed in parts))

    def pull_back_share(share: slice) -> Tensor:
        found = []
        for transformed, stop in zip(parts[share], stops[share], strict=True):
            images = slice(stop - transformed.shape[5], stop)
            transformed_gradient = transform_gradient(gradient[:, images])
            products = torch.bmm(_rows(transformed_gradient), kernels).view_as(transformed)
            transform_back(products, for_images[:, :, :, images], _input_transform_transposed)
            found.append(torch.bmm(_rows(transformed).transpose(1, 2), _rows(transformed_gradient)))
        return torch.stack(found).sum(0)

    for_weight = torch.stack(in_shares(pull_back_share, len(parts))).sum(0)
    shape = (SPAN, SPAN, tasks, *weight.shape[3:])
    return for_images.permute(0, 3, 1, 2, 4), transform_weight_transposed(for_weight.view(shape))


def transform_input(images: Tensor) -> Tensor:
    """(task, image, h, w, c) -> (6, 6, task, rows of tiles, columns of tiles, image, c)."""
    tasks, n, height, width, channels = images.shape
    rows, columns = tiles(height), tiles(width)
    padded = images.new_zeros(tasks, TILE * rows + 2, TILE * columns + 2, n, channels)
    padded[:, 1 : 1 + height, 1 : 1 + width] = images.permute(0, 2, 3, 1, 4)
    half = images.new_empty(SPAN, tasks, rows, TILE * columns + 2, n, channels)
    _input_transform([padded[:, i : i + TILE * rows - 3 : TILE] for i in range(SPAN)], list(half))
    whole = images.new_empty(SPAN, SPAN, tasks, rows, columns, n, channels)
    _input_transform([half[:, :, :, i : i + TILE * columns - 3 : TILE] for i in range(SPAN)], list(whole.unbind(1)))
    return whole


def transform_gradient(gradient: Tensor) -> Tensor:
    """The transpose of the output transform: (task, image, h, w, c) -> (6, 6, task, rows, columns, image, c)."""
    tasks, n, height, width, channels = gradient.shape
    rows, columns = tiles(height), tiles(width)
    padded = gradient.permute(0, 2, 3, 1, 4)
    if (height, width) != (TILE * rows, TILE * columns):
        padded = gradient.new_zeros(tasks, TILE * rows, TILE * columns, n, channels)
        padded[:, :height, :width] = gradient.permute(0, 2, 3, 1, 4)
    half = gradient.new_empty(SPAN, tasks, rows, TILE * columns, n, channels)
    _output_transform_transposed([padded[:, i::TILE] for i in range(TILE)], list(half))
    whole = gradient.new_empty(SPAN, SPAN, tasks, rows, columns, n, channels)
    _output_transform_transposed([half[:, :, :, i::TILE] for i in range(TILE)], list(whole.unbind(1)))
    return whole


def transform_weight(weight: Tensor) -> Tensor:
    """(task, 3, 3, inputs, outputs) -> (6, 6, task, inputs, outputs)."""
    tasks, _, _, inputs, outputs = weight.shape
    kernel = _kernel(weight)
    flat = kernel @ weight.permute(1, 2, 0, 3, 4).reshape(3, -1)  # (6, 3 * task * inputs * outputs)
    return (kernel @ flat.view(SPAN, 3, -1)).view(SPAN, SPAN, tasks, inputs, outputs)


def transform_weight_transposed(products: Tensor) -> Tensor:
    """The transpose of `transform_weight`: (6, 6, task, inputs, outputs) -> (task, 3, 3, inputs, outputs)."""
    kernel = _kernel(products).T
    flat = (kernel @ products.flatten(1)).view(3, SPAN, -1)
    return (kernel @ flat).view(3, 3, *products.shape[2:]).permute(2, 0, 1, 3, 4)


def transform_back(
    products: Tensor, whole: Tensor, transform: Callable[[list[Tensor], list[Tensor], int], None]
) -> None:
    """(6, 6, task, rows, columns, image, c) -> into (task, h, w, image, c)."""
    _, _, tasks, rows, columns, n, channels = products.shape
    half = products.new_empty(TILE, SPAN, tasks, rows, columns, n, channels)
    transform(list(products), list(half), ROWS)
    for i in range(TILE):
        targets = [whole[:, i::TILE, j::TILE] for j in range(TILE)]
        transform([part[:, : targets[0].shape[1]] for part in half[i]], targets, COLUMNS)


def tiles(length: int) -> int:
    return -(-length // TILE)


def _rows(transformed: Tensor) -> Tensor:
    return transformed.flatten(3, 5).flatten(0, 2)  # (36 * task, rows * columns * image, c)


def _kernel(like: Tensor) -> Tensor:
    return torch.tensor(KERNEL, dtype=like.dtype, device=like.device)  # (6, 3)


def _input_transform(d: list[Tensor], out: list[Tensor]) -> None:
    even, odd = torch.sub(d[4], d[2], alpha=4), torch.sub(d[3], d[1], alpha=4)
    torch.add(even, odd, out=out[1])
    torch.sub(even, odd, out=out[2])
    torch.sub(d[4], d[2], out=even)
    torch.sub(d[3], d[1], out=odd)
    torch.add(even, odd, alpha=2, out=out[3])
    torch.sub(even, odd, alpha=2, out=out[4])
    torch.sub(d[0], d[2], out=out[0])
    torch.add(even, out[0], alpha=4, out=out[0])
    torch.sub(d[5], d[3], out=out[5])
    out[5].sub_(odd, alpha=4)


def _output_transform_transposed(g: list[Tensor], out: list[Tensor]) -> None:
    even, odd = g[0] + g[2], g[1] + g[3]
    torch.add(even, odd, out=out[1])
    torch.sub(even, odd, out=out[2])
    torch.add(g[0], g[2], alpha=4, out=even)
    torch.add(g[1], g[3], alpha=4, out=odd)
    torch.add(even, odd, alpha=2, out=out[3])
    torch.sub(even, odd, alpha=2, out=out[4])
    out[0].copy_(g[0])
    out[5].copy_(g[3])


# The last tiles may reach over the edge: results may be shorter along `axis` than their inputs.


def _output_transform(m: list[Tensor], out: list[Tensor], axis: int) -> None:
    near, far = m[1] + m[2], m[3] + m[4]
    _add(near, far, 4, out[2], axis)
    _add(near.add_(m[0]), far, 1, out[0], axis)
    torch.sub(m[1], m[2], out=near)
    torch.sub(m[3], m[4], out=far)
    _add(near, far, 2, out[1], axis)
    _add(near.add_(m[5]), far, 8, out[3], axis)


def _input_transform_transposed(m: list[Tensor], out: list[Tensor], axis: int) -> None:
    """The transpose of `_input_transform`. Tiles overlap, so it also adds numbers from the next and previous tile."""
    near, far = m[1] + m[2], m[3] + m[4]
    _add(near.add_(far), m[0], 1, out[3], axis)
    reach = min(out[3].shape[axis], m[0].shape[axis] - 1)
    out[3].narrow(axis, 0, reach).add_(m[0].narrow(axis, 1, reach), alpha=4)
    near.mul_(-4).add_(far, alpha=3)
    _add(near, m[0], -5, out[1], axis)
    torch.sub(m[1], m[2], out=near)
    torch.sub(m[3], m[4], out=far)
    torch.add(near, far, alpha=2, out=far)
    _add(far, m[5], -5, out[2], axis)
    torch.add(far, near, alpha=3, out=near)
    _add(near.neg_(), m[5], 4, out[0], axis)
    rest = out[0].shape[axis] - 1
    out[0].narrow(axis, 1, rest).add_(m[5].narrow(axis, 0, rest))


def _add(x: Tensor, y: Tensor, scale: int, result: Tensor, axis: int) -> None:
    length = result.shape[axis]
    torch.add(x.narrow(axis, 0, length), y.narrow(axis, 0, length), alpha=scale, out=result)
