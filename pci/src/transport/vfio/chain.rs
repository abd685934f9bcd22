//! Information structures of `linux/vfio.h` and their capability chains, parsed from bytes.
//!
//! The kernel is trusted, but a chain is offsets within a buffer: it is walked with every bound
//! checked, once, here.

use std::ops::RangeInclusive;

use thiserror::Error;
use vfio_bindings::bindings::vfio::{
    VFIO_IOMMU_INFO_CAPS, VFIO_IOMMU_INFO_PGSIZES, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE,
    VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL, VFIO_REGION_INFO_CAP_SPARSE_MMAP, VFIO_REGION_INFO_FLAG_CAPS,
    VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE,
};

use crate::transport::{DmaLimits, Region};

/// An information structure that does not hold what it says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(crate) enum ChainError {
    /// The structure or a capability ends early.
    #[error("the kernel's answer is cut off at byte {at}")]
    Truncated { at: usize },
    /// A chain does not end.
    #[error("the kernel's capability chain is cyclic at byte {at}")]
    Cyclic { at: usize },
    /// Something that every kernel since 5.4 says is missing.
    #[error("the kernel does not say which IOVAs are usable; Linux 5.4 or newer is needed")]
    NoRanges,
}

/// Bytes with checked little reads, in the machine's byte order.
#[derive(Clone, Copy)]
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn array<const N: usize>(self, at: usize) -> Result<[u8; N], ChainError> {
        self.0
            .get(at..)
            .and_then(|rest| rest.first_chunk())
            .copied()
            .ok_or(ChainError::Truncated { at })
    }

    fn u16(self, at: usize) -> Result<u16, ChainError> {
        self.array(at).map(u16::from_ne_bytes)
    }

    fn u32(self, at: usize) -> Result<u32, ChainError> {
        self.array(at).map(u32::from_ne_bytes)
    }

    fn u64(self, at: usize) -> Result<u64, ChainError> {
        self.array(at).map(u64::from_ne_bytes)
    }

    fn from(self, at: usize) -> Result<Bytes<'a>, ChainError> {
        self.0
            .get(at..)
            .map(Bytes)
            .ok_or(ChainError::Truncated { at })
    }

    /// `count` pairs of 64-bit numbers from `at` on.
    fn pairs(self, at: usize, count: u32) -> Result<Vec<(u64, u64)>, ChainError> {
        let count = count as usize;
        let end = count
            .checked_mul(16)
            .and_then(|len| len.checked_add(at))
            .filter(|&end| end <= self.0.len());
        if end.is_none() {
            return Err(ChainError::Truncated { at: self.0.len() });
        }
        (0..count)
            .map(|n| Ok((self.u64(at + 16 * n)?, self.u64(at + 16 * n + 8)?)))
            .collect()
    }

    /// Every capability from `first` on: its ID and its bytes from its header on. `struct
    /// vfio_info_cap_header` is id, version, next.
    fn chain(self, first: u32) -> Result<Vec<(u16, Bytes<'a>)>, ChainError> {
        let mut found = Vec::new();
        let mut at = first as usize;
        while at != 0 {
            // Headers take 8 bytes, so more of them than that would fit is a cycle.
            if found.len() > self.0.len() / 8 {
                return Err(ChainError::Cyclic { at });
            }
            found.push((self.u16(at)?, self.from(at)?));
            at = self.u32(at + 4)? as usize;
        }
        Ok(found)
    }
}

/// A region, and where it is in the device's file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PlacedRegion {
    pub(crate) region: Region,
    /// Bytes from the start of the device's file.
    pub(crate) file_offset: u64,
}

/// Parses a `struct vfio_region_info` with its chain.
pub(crate) fn region(bytes: &[u8], page_size: u64) -> Result<PlacedRegion, ChainError> {
    let info = Bytes(bytes);
    let flags = info.u32(4)?;
    let size = info.u64(16)?;
    let file_offset = info.u64(24)?;
    let mut mappable = Vec::new();
    if flags & VFIO_REGION_INFO_FLAG_MMAP != 0 {
        mappable.push((0, size));
    }
    if flags & VFIO_REGION_INFO_FLAG_CAPS != 0 {
        for (id, capability) in info.chain(info.u32(12)?)? {
            if u32::from(id) == VFIO_REGION_INFO_CAP_SPARSE_MMAP {
                // struct vfio_region_info_cap_sparse_mmap: header, nr_areas, reserved, areas.
                mappable = capability.pairs(16, capability.u32(8)?)?;
            }
        }
    }
    // Only whole pages inside the region can be mapped.
    mappable.retain(|&(offset, len)| {
        len != 0
            && offset % page_size == 0
            && len % page_size == 0
            && offset.checked_add(len).is_some_and(|end| end <= size)
    });
    mappable.sort_unstable();
    Ok(PlacedRegion {
        region: Region {
            size,
            readable: flags & VFIO_REGION_INFO_FLAG_READ != 0,
            writable: flags & VFIO_REGION_INFO_FLAG_WRITE != 0,
            mappable,
        },
        file_offset,
    })
}

/// Parses a `struct vfio_iommu_type1_info` with its chain.
pub(crate) fn type1_limits(bytes: &[u8], page_size: u64) -> Result<DmaLimits, ChainError> {
    let info = Bytes(bytes);
    let flags = info.u32(4)?;
    let mut limits = DmaLimits {
        ranges: Vec::new(),
        page_size,
        entries_left: None,
    };
    if flags & VFIO_IOMMU_INFO_PGSIZES != 0 {
        limits.page_size = smallest_page(info.u64(8)?, page_size);
    }
    if flags & VFIO_IOMMU_INFO_CAPS != 0 {
        for (id, capability) in info.chain(info.u32(16)?)? {
            match u32::from(id) {
                // struct vfio_iommu_type1_info_cap_iova_range: header, nr_iovas, reserved, ranges.
                VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE => {
                    limits.ranges = ranges(capability.pairs(16, capability.u32(8)?)?);
                }
                // struct vfio_iommu_type1_info_dma_avail: header, avail.
                VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL => limits.entries_left = Some(capability.u32(8)?),
                _ => {}
            }
        }
    }
    if limits.ranges.is_empty() {
        return Err(ChainError::NoRanges);
    }
    Ok(limits)
}

/// The smallest page of a bitmap of page sizes, and not less than the CPU's: memory is locked by
/// the CPU's pages.
fn smallest_page(bitmap: u64, page_size: u64) -> u64 {
    match bitmap {
        0 => page_size,
        bitmap => (1 << bitmap.trailing_zeros()).max(page_size),
    }
}

/// First and last IOVAs as ascending ranges; what ends before it starts is left out.
pub(crate) fn ranges(pairs: Vec<(u64, u64)>) -> Vec<RangeInclusive<u64>> {
    let mut pairs = pairs;
    pairs.retain(|(start, last)| start <= last);
    pairs.sort_unstable();
    pairs
        .into_iter()
        .map(|(start, last)| start..=last)
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = 4096;

    fn bytes(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// argsz, flags, index, cap_offset, size (2), offset (2), then the chain.
    fn region_info(flags: u32, size: u32, chain: &[u32]) -> Vec<u8> {
        let mut words = vec![0, flags, 0, 32, size, 0, 0, 0x100];
        words.extend_from_slice(chain);
        bytes(&words)
    }

    #[test]
    fn region_without_chain_is_mappable_whole() {
        let placed = region(&region_info(7, 0x2_0000, &[]), PAGE).unwrap();
        assert_eq!(placed.region.mappable, [(0, 0x2_0000)]);
        assert!(placed.region.readable && placed.region.writable);
        assert_eq!(placed.file_offset, 0x100_0000_0000);
    }

    #[test]
    fn region_that_may_not_be_mapped_has_no_areas() {
        let placed = region(&region_info(3, 0x20, &[]), PAGE).unwrap();
        assert_eq!((placed.region.size, placed.region.mappable), (0x20, vec![]));
    }

    #[test]
    fn sparse_areas_replace_the_whole() {
        // id 1 version 1, next 0, two areas, reserved; 0x3000+0x1000, 0x0+0x2000.
        let chain = [0x1_0001, 0, 2, 0, 0x3000, 0, 0x1000, 0, 0, 0, 0x2000, 0];
        let placed = region(&region_info(0xf, 0x4000, &chain), PAGE).unwrap();
        assert_eq!(placed.region.mappable, [(0, 0x2000), (0x3000, 0x1000)]);
    }

    #[test]
    fn sparse_area_outside_the_region_is_left_out() {
        let chain = [0x1_0001, 0, 1, 0, 0x3000, 0, 0x2000, 0];
        let placed = region(&region_info(0xf, 0x4000, &chain), PAGE).unwrap();
        assert_eq!(placed.region.mappable, []);
    }

    #[test]
    fn region_smaller_than_a_page_is_not_mappable() {
        let placed = region(&region_info(7, 0x80, &[]), PAGE).unwrap();
        assert_eq!(placed.region.mappable, []);
    }

    #[test]
    fn more_areas_than_bytes_is_an_error() {
        let chain = [0x1_0001, 0, u32::MAX, 0];
        assert!(matches!(
            region(&region_info(0xf, 0x4000, &chain), PAGE),
            Err(ChainError::Truncated { .. })
        ));
    }

    #[test]
    fn cyclic_chain_is_an_error() {
        let chain = [0x1_0003, 32];
        assert!(matches!(
            region(&region_info(0xf, 0x4000, &chain), PAGE),
            Err(ChainError::Cyclic { .. })
        ));
    }

    /// argsz, flags, page sizes (2), cap_offset, pad, then the chain.
    fn iommu_info(flags: u32, page_sizes: u32, chain: &[u32]) -> Vec<u8> {
        let mut words = vec![0, flags, page_sizes, 0, 24, 0];
        words.extend_from_slice(chain);
        bytes(&words)
    }

    /// A 39-bit IOMMU: DMA_AVAIL 65535 at 24, then IOVA_RANGE at 40 around the MSI window.
    const CHAIN_39_BITS: &[u32] = &[
        0x1_0003,
        40,
        65_535,
        0, //
        0x1_0001,
        0,
        2,
        0, //
        0,
        0,
        0xfedf_ffff,
        0, //
        0xfef0_0000,
        0,
        0xffff_ffff,
        0x7f,
    ];

    #[test]
    fn c22_ranges_and_entries_are_taken_from_the_chain() {
        let limits = type1_limits(&iommu_info(3, 0x4020_1000, CHAIN_39_BITS), PAGE).unwrap();
        assert_eq!(
            limits.ranges,
            [0..=0xfedf_ffff, 0xfef0_0000..=0x7f_ffff_ffff]
        );
        assert_eq!(limits.page_size, 4096);
        assert_eq!(limits.entries_left, Some(65_535));
    }

    #[test]
    fn kernel_that_names_no_ranges_is_an_error() {
        assert_eq!(
            type1_limits(&iommu_info(1, 0x1000, &[]), PAGE),
            Err(ChainError::NoRanges)
        );
    }

    #[test]
    fn iommu_page_below_the_cpus_is_not_offered() {
        let limits = type1_limits(&iommu_info(3, 0x200, CHAIN_39_BITS), PAGE).unwrap();
        assert_eq!(limits.page_size, 4096);
    }

    #[test]
    fn range_that_ends_before_it_starts_is_left_out() {
        assert_eq!(ranges(vec![(0x2000, 0x2fff), (5, 4)]), [0x2000..=0x2fff]);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = region(&bytes, PAGE);
            let _ = type1_limits(&bytes, PAGE);
            // Small offsets, so that chains are followed.
            for (at, byte) in bytes.iter_mut().enumerate() {
                if at % 4 != 0 {
                    *byte = 0;
                }
            }
            let _ = region(&bytes, PAGE);
            let _ = type1_limits(&bytes, PAGE);
        }
    }
}
