"""The vocoder (BigVGAN): 40 feature vectors per second to 32,000 samples per second."""

from __future__ import annotations

from torch import Tensor, nn

from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.audio_vae.filters import AliasFreeSnakeBeta
from comfyui_h3.h3core.models.audio_vae.weight_norm import WeightNormConv1d, WeightNormConvTranspose1d, weight_of
from comfyui_h3.kernels.conv1d import conv1d


class Conv(WeightNormConv1d):
    """A convolution that keeps the length: (B, C, n) -> (B, C', n). What is added to its result is added on the way."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, dilation: int = 1, bias: bool = True):
        super().__init__(in_channels, out_channels, kernel, dilation=dilation, bias=bias)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, total: Tensor | None = None, divisor: int = 1
    ) -> Tensor:
        """(conv(x) + residual + total) / divisor."""
        dilation = self.dilation[0]
        return conv1d(x, weight_of(self), self.bias, dilation, residual=residual, total=total, divisor=divisor)


class ResBlock(nn.Module):
    """Three residual pairs of convolutions, the first of each pair dilated by 1, 3, 5."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]):
        super().__init__()
        self.convs1 = nn.ModuleList(Conv(channels, channels, kernel, dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(Conv(channels, channels, kernel) for _ in dilations)
        self.activations = nn.ModuleList(AliasFreeSnakeBeta(channels) for _ in range(2 * len(dilations)))

    def forward(self, x: Tensor, total: Tensor | None = None, divisor: int = 1) -> Tensor:
        """(the block's result + total) / divisor: blocks side by side are added up as they come."""
        last = len(self.convs1) - 1
        for i, (conv1, conv2) in enumerate(zip(self.convs1, self.convs2, strict=True)):
            y = self.activations[2 * i + 1](conv1(self.activations[2 * i](x)))
            x = conv2(y, residual=x) if i < last else conv2(y, residual=x, total=total, divisor=divisor)
        return x


class Vocoder(nn.Module):
    """(B, latent_dim, A) -> (B, 1, hop_length * A), clamped to [-1, 1]."""

    def __init__(self, config: AudioVAEConfig):
        super().__init__()
        self.conv_pre = Conv(config.latent_dim, config.decoder_dim, 7)
        self.ups = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        self.num_kernels = len(config.resblock_kernels)
        channels = config.decoder_dim
        for rate, kernel in zip(config.decoder_rates, config.decoder_kernels, strict=True):
            up = WeightNormConvTranspose1d(channels, channels // 2, kernel, rate)
            # A list of one: the checkpoint's names have this level.
            self.ups.append(nn.ModuleList([up]))
            channels //= 2
            self.resblocks.extend(ResBlock(channels, k, config.dilations) for k in config.resblock_kernels)
        self.activation_post = AliasFreeSnakeBeta(channels)
        self.conv_post = Conv(channels, 1, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_pre(x)
        for i, up in enumerate(self.ups):
            x = up[0](x)  # type: ignore[index]
            first, last = i * self.num_kernels, (i + 1) * self.num_kernels - 1
            total = None
            for block in self.resblocks[first:last]:
                total = block(x, total)
            x = self.resblocks[last](x, total, divisor=self.num_kernels)  # the mean of the blocks
        return self.conv_post(self.activation_post(x)).clamp(-1, 1)
