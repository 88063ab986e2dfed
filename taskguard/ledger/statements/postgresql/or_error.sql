-- The end of complete.sql if a COMMIT is in the same message. If nothing was completed, it raises
-- an error, so that the COMMIT does nothing either. The error contains "begun", unless the body has
-- ended the transaction.
union all
select cast(
    'taskguard: ' || coalesce(current_setting('taskguard.transaction', true), '') as integer
)
where not exists (select from finished)
