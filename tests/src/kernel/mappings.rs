//! Mapping and unmapping, as the kernel answers them.

use failstop_pci::transport::vfio::Iommu;
use failstop_pci::transport::{Iova, Kind, MapError, Unmapped};

use super::{Pages, open};
use crate::fixture::{Outcome, ensure, ensure_eq};

const PAGE: u64 = Pages::SIZE;
const HERE: Iova = Iova(0x10_0000);

pub(super) fn a_mapping_is_unmapped_exactly(iommu: Iommu) -> Outcome {
    let transport = open(iommu)?;
    transport.dma_map(HERE, Pages::new(4)?.first(4)?)?;
    ensure_eq(
        transport.dma_unmap(HERE, 4 * PAGE),
        Unmapped::Exact,
        "unmap",
    )?;
    ensure_eq(
        transport.dma_unmap(HERE, 4 * PAGE),
        Unmapped::Absent,
        "unmap again",
    )
}

pub(super) fn nothing_mapped_is_absent(iommu: Iommu) -> Outcome {
    ensure_eq(
        open(iommu)?.dma_unmap(HERE, PAGE),
        Unmapped::Absent,
        "unmap",
    )
}

pub(super) fn c6_unmap_of_a_part_is_not_success(iommu: Iommu) -> Outcome {
    let transport = open(iommu)?;
    transport.dma_map(HERE, Pages::new(2)?.first(2)?)?;
    let part = transport.dma_unmap(HERE, PAGE);
    ensure(part != Unmapped::Exact, || {
        "half a mapping was unmapped".into()
    })?;
    // Nothing of it went.
    ensure_eq(
        transport.dma_unmap(HERE, 2 * PAGE),
        Unmapped::Exact,
        "unmap of all",
    )
}

pub(super) fn c6_unmap_of_more_than_was_mapped_is_not_exact(iommu: Iommu) -> Outcome {
    let transport = open(iommu)?;
    transport.dma_map(HERE, Pages::new(1)?.first(1)?)?;
    ensure_eq(
        transport.dma_unmap(HERE, 2 * PAGE),
        Unmapped::Partial { bytes: PAGE },
        "unmap",
    )
}

pub(super) fn c6_map_over_an_existing_mapping_is_an_error(iommu: Iommu) -> Outcome {
    let transport = open(iommu)?;
    let pages = Pages::new(2)?;
    transport.dma_map(HERE, pages.first(2)?)?;
    let over = transport.dma_map(Iova(HERE.0 + PAGE), pages.first(1)?);
    ensure(matches!(over, Err(MapError::Exists { .. })), || {
        format!("{over:?}")
    })?;
    ensure_eq(
        transport.dma_unmap(HERE, 2 * PAGE),
        Unmapped::Exact,
        "unmap",
    )
}

pub(super) fn c25_entries_left_are_counted(iommu: Iommu) -> Outcome {
    let transport = open(iommu)?;
    let before = transport.dma_limits()?;
    ensure_eq(before.page_size, PAGE, "page size")?;
    transport.dma_map(HERE, Pages::new(8)?.first(8)?)?;
    let after = transport.dma_limits()?;
    match (transport.kind(), before.entries_left, after.entries_left) {
        // Contiguous memory is one entry.
        (Kind::Container, Some(before), Some(after)) => {
            ensure_eq(after, before - 1, "entries left")
        }
        (Kind::Iommufd, None, None) => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}

/// The last IOVA of 39 bits.
const LAST_39: u64 = (1 << 39) - 1;

pub(super) fn c22_usable_iovas_end_at_39_bits(iommu: Iommu) -> Outcome {
    let transport = open(iommu)?;
    let ranges = transport.dma_limits()?.ranges;
    let last = ranges.last().ok_or("no ranges")?;
    ensure_eq(*last.end(), LAST_39, "last usable IOVA")?;
    let msi = 0xfee0_0000;
    ensure(!ranges.iter().any(|range| range.contains(&msi)), || {
        "the MSI window is offered".into()
    })?;
    let above = transport.dma_map(Iova(LAST_39 + 1), Pages::new(1)?.first(1)?);
    ensure(above.is_err(), || {
        "mapped above the last usable IOVA".into()
    })
}

pub(super) fn c22_the_last_usable_page_can_be_mapped(iommu: Iommu) -> Outcome {
    let transport = open(iommu)?;
    let last = Iova(LAST_39 + 1 - PAGE);
    transport.dma_map(last, Pages::new(1)?.first(1)?)?;
    ensure_eq(transport.dma_unmap(last, PAGE), Unmapped::Exact, "unmap")
}
