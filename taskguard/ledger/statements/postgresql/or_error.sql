-- The end of complete.sql where a COMMIT is in the same message. If nothing was done: an error, by
-- which that COMMIT does nothing either. It has "begun" in it, unless the body has ended the
-- transaction.
union all
select cast(
    'taskguard: ' || coalesce(current_setting('taskguard.transaction', true), '') as integer
)
where not exists (select from finished)
