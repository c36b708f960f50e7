//! The figures in virtual time: the shape of the paper's comes out, twice the same.

use std::sync::LazyLock;

use fjord_bench::{Figure, FigureReport, Ordering, OrderingReport, OrderingRow, run_figure};

/// Figure 10, run once for the tests that look at it.
fn figure_10() -> &'static FigureReport {
    static FIGURE: LazyLock<FigureReport> =
        LazyLock::new(|| run_figure(Figure::Barrier10).unwrap());
    &FIGURE
}

fn percent(report: &OrderingReport, profile: &str, ordering: Ordering) -> f64 {
    let of = |row: &&OrderingRow| row.profile == profile && row.ordering == ordering;
    report.rows.iter().find(of).expect("all devices and orderings are there").percent_of_orderless
}

/// With the barrier writes going through the epoch scheduler.
#[test]
fn figure_9_has_the_shape_of_the_paper() {
    let figure = run_figure(Figure::Barrier9).unwrap();
    let FigureReport::Ordering(report) = &figure else { panic!("another figure") };
    // It is what another run came to.
    the_page_shows(Figure::Barrier9, &report.to_table());
    for (profile, flush, barrier) in
        [("ufs", 10.0, 80.0), ("plain-ssd", 0.5, 90.0), ("supercap-ssd", 35.0, 90.0)]
    {
        let of = |ordering| percent(report, profile, ordering);
        assert!((of(Ordering::TransferAndFlush) / flush - 1.0).abs() < 0.1, "{profile}");
        assert!(of(Ordering::WaitOnTransfer) < 40.0, "{profile}");
        assert!((of(Ordering::Barrier) - barrier).abs() < 4.0, "{profile}");
    }
    assert!(percent(report, "nvme", Ordering::Barrier) > 85.0);
}

/// Virtual time is the same everywhere, so the page can be held to it.
fn the_page_shows(figure: Figure, table: &str) {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/benchmarks.md");
    let page = std::fs::read_to_string(page).unwrap();
    let name = figure.name();
    assert!(
        page.contains(table.trim()),
        "docs/benchmarks.md shows other figures: put the output of `fjord bench --figure {name}` \
         there, and draw its SVGs again\n{table}"
    );
}

/// Where the scheduler is to keep them, and where not: see docs/ordering.md.
#[test]
fn who_waits_waits_three_times_as_long_at_most() {
    let report = run_figure(Figure::SyncLatency).unwrap();
    let FigureReport::Latency(latency) = &report else { panic!("another figure") };
    the_page_shows(Figure::SyncLatency, &report.to_table());
    assert_eq!(latency.rows.len(), 79);
    for row in &latency.rows {
        let multiple = row.p50_multiple.max(row.p99_multiple);
        assert_eq!(multiple <= 3.0, row.is_bounded, "{row:?}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("figure.svg");
    report.write_svg(&path).unwrap();
    let svg = std::fs::read_to_string(path).unwrap();
    assert!(svg.contains("supercap-ssd") && svg.contains("not promoting"));
}

#[test]
fn figure_10_shows_full_queues_with_barriers_and_one_command_without() {
    let figure = figure_10();
    let FigureReport::Ordering(report) = figure else { panic!("another figure") };
    for row in report.rows.iter().filter(|row| row.profile != "disk") {
        let most = row.queue_depth_over_time.iter().map(|(_, depth)| *depth).max().unwrap();
        match row.ordering {
            Ordering::WaitOnTransfer | Ordering::TransferAndFlush => {
                assert_eq!((row.queue_depth_max, most), (1, 1), "{}", row.profile);
            }
            Ordering::Barrier | Ordering::Orderless => {
                assert_eq!(
                    (row.queue_depth_max, most),
                    (row.queue_depth as usize, row.queue_depth)
                );
                assert!(row.queue_depth_mean > 0.9 * f64::from(row.queue_depth), "{}", row.profile);
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("figure.svg");
    figure.write_svg(&path).unwrap();
    let svg = std::fs::read_to_string(path).unwrap();
    assert!(svg.contains("plain-ssd") && svg.contains("wait-on-transfer"));
}

#[test]
fn the_same_figure_comes_out_twice() {
    let again = run_figure(Figure::Barrier10).unwrap();
    assert_eq!(figure_10().to_json(), again.to_json());
}
