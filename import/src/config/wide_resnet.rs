//! Wide residual networks (Zagoruyko & Komodakis 2016) of bottleneck blocks (He et al. 2016), in
//! the sizes of Alpa's benchmark (Zheng et al. 2022). transformers has no such family, so the
//! fields are ours.

use super::document::Fields;
use super::{EPSILONS, HARMLESS_FIELDS, LAYERS, VOCAB, WIDTHS};
use crate::ImportError;
use serde_json::json;
use std::ops::RangeInclusive;

/// Height and width of images.
const SIZES: RangeInclusive<u64> = 1..=65_536;
/// Channels of images.
const IMAGE_CHANNELS: RangeInclusive<u64> = 1..=1024;
/// Stages of blocks; each halves the image and doubles the channels.
const STAGES: RangeInclusive<u64> = 1..=8;
/// Channels out of a block over its base: He et al. 2016, table 1.
const EXPANSION: u64 = 4;

/// A wide residual network.
#[derive(Clone, Debug, PartialEq)]
pub struct WideResnetConfig {
    /// Height and width of an image.
    pub(crate) image_size: u64,
    pub(crate) image_channels: u64,
    /// Channels of the first convolution, and the base of the first stage.
    pub(crate) base: u64,
    /// Channels of a block's 3 x 3 convolution over its base.
    pub(crate) width_factor: u64,
    /// Blocks of each stage.
    pub(crate) depths: Vec<u64>,
    pub(crate) classes: u64,
    /// Groups of channels with statistics of their own.
    pub(crate) groups: u64,
    pub(crate) epsilon: f64,
}

/// The channels of a bottleneck block, all multiples of the groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bottleneck {
    /// Into the block.
    pub(crate) input: u64,
    /// Between the first two convolutions.
    pub(crate) narrow: u64,
    /// Between the last two.
    pub(crate) wide: u64,
    /// Out of the block.
    pub(crate) output: u64,
    /// The stride of the 3 x 3 convolution, and of the projection beside the block.
    pub(crate) stride: u64,
}

impl Bottleneck {
    /// Says whether what passes by the block has to be projected.
    pub(crate) fn projects(&self) -> bool {
        self.stride != 1 || self.input != self.output
    }
}

impl WideResnetConfig {
    /// Lists the blocks, first to last.
    pub(crate) fn blocks(&self) -> Vec<Bottleneck> {
        let mut input = self.base;
        let mut blocks = Vec::new();
        for (stage, &depth) in self.depths.iter().enumerate() {
            let narrow = self.base << stage;
            for i in 0..depth {
                let block = Bottleneck {
                    input,
                    narrow,
                    wide: narrow * self.width_factor,
                    output: narrow * EXPANSION,
                    stride: if stage > 0 && i == 0 { 2 } else { 1 },
                };
                input = block.output;
                blocks.push(block);
            }
        }
        blocks
    }
    /// Returns the channels of the last block.
    pub(crate) fn features(&self) -> u64 {
        (self.base << (self.depths.len() - 1)) * EXPANSION
    }
    /// Returns the dims of so many channels: groups, and channels of a group.
    pub(crate) fn grouped(&self, channels: u64) -> [u64; 2] {
        [self.groups, channels / self.groups]
    }
}

pub(super) fn read(mut f: Fields) -> Result<WideResnetConfig, ImportError> {
    f.only("hidden_act", &[json!("relu")], "blocks have ReLUs")?;
    f.only(
        "layer_type",
        &[json!("bottleneck")],
        "blocks have three convolutions",
    )?;
    let depths = match f.integers("depths", LAYERS)? {
        Some(depths) => depths,
        None => return Err(f.missing("depths", "the list of the stages' numbers of blocks")),
    };
    let blocks = depths.iter().fold(0u64, |sum, n| sum.saturating_add(*n));
    if !STAGES.contains(&(depths.len() as u64)) || !LAYERS.contains(&blocks) {
        let (stages, most) = (STAGES.end(), LAYERS.end());
        let problem = format!(
            "has {blocks} blocks in {} stages; accepted: 1 to {stages} stages of 1 to {most} blocks together",
            depths.len()
        );
        return Err(f.error("depths", problem));
    }
    let config = WideResnetConfig {
        image_size: f.required("image_size", SIZES)?,
        image_channels: f.integer("num_channels", IMAGE_CHANNELS)?.unwrap_or(3),
        base: f.required("base_channels", WIDTHS)?,
        width_factor: f.integer("width_factor", WIDTHS)?.unwrap_or(1),
        depths,
        classes: f.required("num_classes", VOCAB)?,
        groups: f.integer("norm_groups", WIDTHS)?.unwrap_or(32),
        epsilon: f.number("norm_epsilon", EPSILONS)?.unwrap_or(1e-5),
    };
    check_channels(&config, &f)?;
    f.finish(HARMLESS_FIELDS)?;
    Ok(config)
}

fn check_channels(c: &WideResnetConfig, f: &Fields) -> Result<(), ImportError> {
    if !c.base.is_multiple_of(c.groups) {
        let problem = format!("{} is not a multiple of {}", c.base, c.groups);
        return Err(f.contradiction("base_channels", "norm_groups", problem));
    }
    // Below 2^48: both are at most 2^20, and there are at most 8 stages.
    let widest = (c.base << (c.depths.len() - 1)) * c.width_factor.max(EXPANSION);
    if !WIDTHS.contains(&widest) {
        let most = WIDTHS.end();
        let problem = format!("the last stage has {widest} channels; accepted: at most {most}");
        return Err(f.contradiction("base_channels", "width_factor", problem));
    }
    Ok(())
}
