//! The end of a function's place in its address space, which ends what it could reach there.

use crate::id::DeviceId;

/// Proof that the kernel took this function out of the I/O address space that its IOMMU enforced, and
/// that no other function of this process was in it: whatever was mapped there is out of its reach,
/// also what an unmap failed for.
///
/// Made where the kernel says so: `VFIO_GROUP_UNSET_CONTAINER` returned 0, which it does for a group
/// without an open device only, or `VFIO_DEVICE_DETACH_IOMMUFD_PT` did.
#[derive(Debug)]
#[must_use]
pub struct SpaceLeft {
    device: DeviceId,
}

impl SpaceLeft {
    /// Of a function that is out of its address space, and was alone there.
    pub(crate) fn of(device: DeviceId) -> Self {
        Self { device }
    }

    /// Which device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.device
    }
}
