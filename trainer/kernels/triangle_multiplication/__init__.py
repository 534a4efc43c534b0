"""Triangle multiplication, forward and backward, around a batched matrix product.

``operator`` and ``halves`` are what autograd sees; ``launches`` runs the kernels, with the sizes of
``tiles``. The kernels are in ``forward``, ``backward`` (gradients of output and input) and ``weights``
(gradients of matrices and norms). They share ``blocks``, how a block of positions is read and written,
``gates``, what a projection and its gate give, and what is said here.

Shapes: B batch, N tokens (NP with padding to a multiple of 8, so that rows start at 16 bytes), Z channels
of the pair tensor, C hidden channels, R = B·NP² = 64·Q positions (b, i, j); given as Q, R is known to be a
multiple, and wide loads follow. What stands in the padding is zero.

a, b, x and their gradients have channels first, [channels, R], as the matrix product takes them. z and x are
kept standardised, [R, Z] and [R, C], so that a tile needs no arithmetic on its way from memory to the matrix
units. ``factors`` [3, R] in float32: the reciprocal deviations of z and x, and the mask as 1 or 0. The
projections are not stored: the backward multiplies again.

``prepare_kernel`` takes the norms' scales into the matrices behind them and their offsets into a vector, and
subtracts from each row of a matrix its mean: the product with a standardised row stays what it is, and the
gradient that comes back through it has mean zero, as the gradient of a norm asks. Gates are in units of
-ln 2, for sigmoid(x) = 1 / (1 + 2^-x·log2(e)). Channel c's rows of ``projection`` and ``gate`` are 8 rows
apart in ``packed``: one product gives both, and both in the same thread.

A program has one block of positions, and reads the matrices for it. Of the projections and of the gradients
of output and input there is also a held form: as many programs as run at a time go through all blocks, the
matrices stay in shared memory, and a block's tensors are read during the one before. They come into registers
where they are standardised (projections), into shared memory and from there into registers (the output's
gradient), or straight into the registers from which the matrix units take them (the input's gradient, whose
held form is a kernel of its own, of 2 bytes).

NVIDIA GPUs alone have the instructions of the held forms (but for projections of float32) and of what is
fetched ahead. No table of another GPU asks for them.

Of 2 bytes, tiles whose columns are dealt or whose rows are paired (``dealing``) need no shared memory between
the layout of the matrix units and memory's. Dealt are the positions of a block of a and b; in blocks of 32
channels, as which the matrices' rows are read, the output with its residual, its gradient, and those of the
gate's product and of output's; the x that is kept. The held form of the output's gradient writes dx from
paired rows; that of the input's gradient has all tiles paired and dealt. ``closing`` is there a second time
with its columns dealt, for the standardised x that has come from registers.

Positions are counted in 32 bits. A tile's base is a 64-bit pointer, for the pair tensor of 3 000 tokens has
more elements than 32 bits count; offsets within a tile are 32-bit, but for those of channels, which are R
apart. The held form of the input's gradient has 32 bits for these, too, and is launched where they suffice.
"""
