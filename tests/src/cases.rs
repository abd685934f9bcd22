//! The cases, and what each needs.

use crate::fixture::{Fixture, Outcome};
use crate::net;

mod breaking;
mod life;
mod queues;
mod sleep;
mod traffic;
mod windows;

/// What a case needs of its device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Needs {
    /// A device that can loop back what it sends.
    Loopback,
    /// The same, with 16 queues of each direction and RSS.
    Rss,
    /// A device that can loop back, behind kernel VFIO: a mapped BAR, a real IOMMU.
    KernelVfio,
    /// The same, on a machine whose settings the case may change: a guest.
    OwnMachine,
    /// A guest's device, on a machine whose settings the case may change, with its link down while
    /// the case runs.
    LinkDown,
    /// A wire to a NIC under the kernel's own driver, which `FAILSTOP_KERNEL_NIC` names.
    KernelPeer,
}

/// One behaviour that must hold.
#[derive(Clone, Copy)]
pub struct Case {
    /// What it says, as a test's name.
    pub name: &'static str,
    /// What it needs.
    pub needs: Needs,
    /// Tries it.
    pub run: fn(&Fixture) -> Outcome,
}

macro_rules! cases {
    ($($needs:ident: $module:ident { $($name:ident),+ $(,)? })+) => {
        &[$($(Case { name: stringify!($name), needs: Needs::$needs, run: $module::$name }),+),+]
    };
}

/// Every case.
pub const CASES: &[Case] = cases! {
    Loopback: life {
        open_and_close_leave_nothing,
        a_device_opens_again_and_again,
        a_port_dropped_in_any_order_releases_everything,
        a_close_under_live_objects_makes_shells_of_them,
        a_parent_in_use_is_busy_and_stays_whole,
        c42_region_churn_on_a_live_port_leaves_no_quarantine,
        wrong_sizes_are_refused_and_leave_nothing,
        a_queue_goes_and_comes_back_beside_the_other,
        a_port_comes_back_on_the_same_device,
    }
    LinkDown: life {
        a_hundred_closes_with_link_down_quarantine_nothing,
    }
    Loopback: breaking {
        a_break_in_traffic_is_revoked_and_recovered_under_the_same_port,
        what_was_received_before_a_break_comes_first_after_it,
        c9_after_the_ladder_every_destroy_succeeds_and_frees,
        c30_a_destroy_while_the_ladder_runs_ends,
        c40_a_break_wakes_a_sleeper,
        a_device_that_is_not_broken_is_not_recovered,
        many_breaks_and_recoveries_leave_nothing,
    }
    Loopback: traffic {
        ten_thousand_frames_come_back_unchanged,
        every_length_comes_back_unchanged,
        jumbo_frames_come_back_whole,
        frames_that_cannot_be_sent_are_refused,
        frames_are_conserved,
        the_device_counts_what_we_sent,
        other_stations_frames_need_promiscuous_mode,
        unsent_requests_are_flushed_once,
    }
    Loopback: sleep {
        c26_a_sleeper_is_woken_by_a_frame,
        c26_a_frame_that_came_before_the_sleep_is_not_left_lying,
        a_sleep_without_frames_times_out,
        a_sleeper_outlasts_the_send_queue_beside_it,
    }
    Rss: queues {
        every_flow_arrives_in_the_queue_that_its_hash_names,
        a_port_that_goes_leaves_its_flows_to_the_others,
        breaks_from_every_thread_in_traffic_are_one_ladder,
        a_port_is_carried_while_the_others_do_not_poll,
        a_close_under_ports_on_threads_leaves_nothing,
        c26_a_sleeper_on_each_queue_is_woken_by_its_own_frame,
    }
    Loopback: net {
        what_a_stack_queues_goes_out_in_order_and_comes_back,
        a_stack_needs_spare_frames,
    }
    KernelVfio: windows {
        c14_a_bar_without_memory_decoding_reads_all_ones,
        c33_a_detached_window_reaches_no_register,
        c38_mapping_churn_costs_no_kernel_memory,
        without_bus_mastering_nothing_arrives,
    }
    OwnMachine: windows {
        large_pages_are_used_where_there_are_any,
    }
    KernelPeer: net {
        ping_gets_100_answers,
        tcp_stream_of_16_mib_each_way_arrives_whole,
        capture_on_the_kernel_side_equals_what_the_port_received,
        frames_sent_at_a_broken_device_change_no_byte,
    }
};
