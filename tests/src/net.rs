//! Real input: the kernel's own network stack, at the other end of the wire.
//!
//! ```text
//!   smoltcp - our port - 82576 --- wire --- NIC - its kernel driver - the kernel's stack - ping, std::net
//!             recorded here ^               ^ and captured here
//! ```

mod cases;
mod frames;
mod kernel_nic;
mod offloads;
mod stack;

pub(crate) use cases::{
    a_stack_needs_spare_frames, capture_on_the_kernel_side_equals_what_the_port_received,
    frames_sent_at_a_broken_device_change_no_byte, ping_gets_100_answers,
    tcp_stream_of_16_mib_each_way_arrives_whole,
    what_a_stack_queues_goes_out_in_order_and_comes_back,
};

/// The frames of a capture.
///
/// # Errors
///
/// When it is none.
pub fn captured(pcap: &[u8]) -> Result<Vec<Vec<u8>>, libtest_mimic::Failed> {
    frames::read(pcap)
}

/// The address of the kernel's side, and the prefix length that both have.
const KERNEL_ADDRESS: &str = "192.0.2.1/24";
/// The address of our side.
const OUR_ADDRESS: &str = "192.0.2.2";
