//! A queue belongs to one thread at a time, without a lock on the data path (R11).

use std::thread;

use failstop::dma::frame::Frame;
use failstop::objects::Rq;

fn both(queue: &mut Rq, mine: &mut [Frame], theirs: &mut [Frame]) {
    thread::scope(|scope| {
        scope.spawn(|| queue.burst(mine));
        scope.spawn(|| queue.burst(theirs));
    });
}

fn main() {}
