"""Operations that PyTorch itself decomposes into others when the module is read.

The derivative by parts is PyTorch's for all of them, also where a number is 0 or at a bound. Where it is not, the
operation is in a table of another file instead: the decomposition of softplus has a derivative that is not a number.
"""

from __future__ import annotations

DECOMPOSED = frozenset(
    """
    __and__ __or__ __xor__ addcdiv addcmul arctan2 clamp_max clamp_min clip contiguous deg2rad fill fix floor_divide
    frac hardshrink heaviside isclose isneginf isposinf lerp lift_fresh_copy max.other min.other mish nan_to_num
    rad2deg relu6 rsub selu sgn softshrink special_expit special_logit special_ndtr special_xlogy square threshold to
    true_divide type_as zero
    empty_like eye linspace new_empty new_full new_ones new_zeros one_hot ones ones_like zeros zeros_like
    broadcast_tensors broadcast_to channel_shuffle chunk col2im column_stack concat dstack expand_as flatten glu hstack
    im2col meshgrid movedim narrow numel pad pixel_shuffle pixel_unshuffle reshape reshape_as tile unflatten
    unsafe_chunk view_as vstack atleast_1d atleast_2d atleast_3d
    affine_grid_generator diag diag_embed fliplr flipud index_add index_copy index_fill rot90 select_scatter take
    take_along_dim trace diagonal_copy
    _weight_norm aminmax argsort count_nonzero diff msort nanmean nansum norm std std_mean var var_mean
    addr baddbmm block_diag chain_matmul cross inner inverse kron linalg_matrix_norm linalg_matrix_power
    linalg_multi_dot linalg_norm linalg_vecdot outer pairwise_distance tensordot vdot
    fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_irfft fft_irfft2
    fft_irfftn fft_rfft fft_rfft2 fft_rfftn
    binary_cross_entropy_with_logits cross_entropy_loss huber_loss kl_div l1_loss mse_loss nll_loss2d_forward
    nll_loss_forward nll_loss_nd smooth_l1_loss nll_loss nll_loss2d _pad_circular _pad_enum _weight_norm_interface
    gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell
    """.split()
)
