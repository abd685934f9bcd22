//! A queue is not polled once it was destroyed, whatever the device said (R5).

use failstop::dma::frame::Frame;
use failstop::objects::Rq;
use failstop::owned::Owned;

fn after(mut queue: Owned<Rq>, frames: &mut [Frame]) {
    queue.destroy();
    queue.burst(frames);
}

fn main() {}
