//! Compares targets from the command line: `compare DIR [TARGETS [WORKLOADS [THREADS]]]`, lists
//! separated by commas. The plot goes to `DIR/latency.svg`.

use std::ops::ControlFlow;

use fjord_bench::{Options, Result, Target, Workload, run};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut options = Options::new(args.first().map_or("fjord-bench", String::as_str));
    if let Some(names) = args.get(1) {
        options.targets = names.split(',').map(Target::from_name).collect::<Result<_>>()?;
    }
    if let Some(names) = args.get(2) {
        options.workloads = names.split(',').map(Workload::from_name).collect::<Result<_>>()?;
    }
    if let Some(count) = args.get(3).and_then(|count| count.parse().ok()) {
        options.fsync_threads = vec![count];
    }
    let report = run(&options, &mut |progress| {
        eprintln!("{}/{} {}", progress.done_count, progress.total_count, progress.what);
        ControlFlow::Continue(())
    })?;
    println!("{}", report.to_table());
    report.write_latency_svg(&options.dir.join("latency.svg"))
}
